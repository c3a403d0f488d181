"""Examine all launches of an encoding; print a table, or the exceptions, of all encodings."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.offline_gpu.compiler import specialize
from tests.offline_gpu.findings import Findings, examine
from tests.offline_gpu.launches import ALL, ARCHITECTURES, Launch, architectures, launches
from tests.offline_gpu.limits import measures

HEAD = """\
# What Triton's kernels exceed: encoding | sm_ | launch | measure | the most that was found.
# Written by `python -m tests.offline_gpu.examine --exceptions`. A bound may only become smaller.
"""


def findings(
    encodings: Sequence[str], of: Sequence[int] = ARCHITECTURES
) -> Iterator[tuple[int, Launch, Findings]]:
    """Compile each different launch of some encodings, for each of some architectures."""
    for architecture in of:
        chosen = dict[tuple[str, str], Launch]()
        for encoding in encodings:
            if architecture in architectures(encoding):
                for launch in launches(encoding, architecture):
                    key = encoding, specialize(launch, architecture).key
                    chosen.setdefault(key, launch)
        examined = examine([*chosen.values()], architecture)
        for launch, found in zip(chosen.values(), examined, strict=True):
            yield architecture, launch, found


def excesses(
    encodings: Sequence[str], of: Sequence[int] = ARCHITECTURES
) -> dict[tuple[str, int, str, str], float]:
    """What exceeds its limit: the most of each measure, by encoding, architecture and so on."""
    most = defaultdict[tuple[str, int, str, str], float](float)
    for architecture, launch, found in findings(encodings, of):
        for name, value, limit in measures(launch, found, architecture):
            if value > limit:
                key = launch.encoding, architecture, launch.label, name
                most[key] = max(most[key], value)
    return dict(most)


def table(encodings: list[str]) -> Iterator[str]:
    """Yield rows of a Markdown table: the worst of all shapes, one architecture after another."""
    for encoding in encodings:
        rows = defaultdict[str, dict[int, list[Findings]]](lambda: defaultdict(list))
        for architecture, launch, found in findings([encoding]):
            if launch.label != "sum":
                rows[launch.label][architecture].append(found)
        for label, cells in rows.items():
            each = cells.values()
            lanes = [max(found.lane_instructions for found in cell) for cell in each]
            columns = (
                "/".join(str(architecture) for architecture in cells),
                "/".join(str(max(found.registers for found in cell)) for cell in each),
                "/".join(f"{max(found.shared for found in cell) / 1024:.0f}" for cell in each),
                "/".join(str(max(found.spills for found in cell)) for cell in each),
                "/".join(str(max(found.byte_loads for found in cell)) for cell in each),
                "/".join(f"{number:.1f}" for number in lanes) if any(lanes) else "",
            )
            yield f"| {encoding} | {label} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exceptions", action="store_true", help="print what exceeds its limit")
    parser.add_argument("--encodings", nargs="*", default=ALL)
    given = parser.parse_args()
    if given.exceptions:
        print(HEAD, end="")
        for encoding in given.encodings:
            for key, value in sorted(excesses([encoding]).items()):
                print(" | ".join((*map(str, key), f"{value:g}")), flush=True)
        return
    print("| encoding | launch | sm_ | registers | shared KiB | spills | byte loads | lane |")
    print("|---|---|---|---|---|---|---|---|")
    for row in table(given.encodings):
        print(row, flush=True)


if __name__ == "__main__":
    main()
