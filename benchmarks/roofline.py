"""Every CPU kernel beside what memory and arithmetic allow: a roofline.

    python benchmarks/roofline.py --plot docs/figures/roofline.svg
    ... --formats q4_k q8_0 --threads 1

Sizes are those of Qwen3-30B-A3B. A kernel's bytes and operations are those that its result needs:
weights, inputs and outputs once, two operations for each weight and token. Experts are those of
one step in which all tokens choose the same eight. Before each call, reading alone is timed on
64 MB: this also evicts the caches, as a model's other layers do. Of a kernel's calls, and of the
reads before them, the best counts: others shared the cores with other processes. With --threads 1
times are CPU time, so that they can be measured beside other work.

    limit       the largest of three times: the bytes at the rate of reading alone, the operations
                at the peak of such products, and a call of a kernel that does nothing
    % of limit  this time over the kernel's
    Gop/s peak  products in registers, the best of the same run: of float32; of codes with
                inputs of 8 bits; half of that for inputs of 15 bits, which take two products
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, note, table
from roofline_kernels import BYTES, FLOATS, FORMATS, LONG, QUICK, Case, Sizes, all_cases

from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

READ_BYTES, UNIT = 64 << 20, 64 << 10
BOTTOM = 0.2  # Gop/s, of the plot
COLUMNS = ("kernel", "tokens", "MB", "Mop", "us", "GB/s", "Gop/s", "reading GB/s", "limit",
           "% of limit")  # fmt: skip
COLOURS = {BYTES: "#0072b2", LONG: "#009e73", FLOATS: "#d55e00"}


@dataclass(frozen=True)
class Measured:
    """A kernel's best seconds, and what it is compared with.

    reading: most bytes a second of reading alone, just before the calls
    """

    case: Case
    seconds: float
    reading: float
    machine: Machine

    @property
    def floors(self) -> dict[str, float]:
        """Seconds by limit."""
        case, limits = self.case, self.machine
        return {
            "memory": case.nbytes / self.reading,
            "arithmetic": case.operations / limits.peaks[case.products],
            "call": limits.call_s[case.wide],
        }

    @property
    def limit(self) -> str:
        return max(self.floors, key=lambda name: self.floors[name])

    @property
    def share(self) -> float:
        return self.floors[self.limit] / self.seconds


class Machine:
    """This machine's limits: reading alone, peaks of arithmetic, and an empty region."""

    def __init__(self, quick: bool) -> None:
        self._memory = torch.ones(READ_BYTES >> (4 if quick else 0), dtype=torch.uint8)
        self._units = 20 if quick else 100  # of products: about a millisecond
        self.peaks = dict.fromkeys((FLOATS, BYTES, LONG), 0.0)
        self.update_peaks()
        self.call_s = {
            wide: min(self._run("read_memory", 0, wide)[1] for _ in range(99))
            for wide in (True, False)
        }
        self.readings: list[float] = []

    def _run(self, kernel: str, units: int, wide: bool = True) -> tuple[Any, float]:
        call = library().structure("PeakCall")(
            memory=self._memory.data_ptr(), units=units, unit_bytes=UNIT
        )
        return call, seconds_of(kernel_entry(kernel), ctypes.addressof(call), wide)

    def update_peaks(self) -> None:
        """Measure the peaks of arithmetic again: the best of the whole run counts."""
        for kernel, products in (("multiply_floats", FLOATS), ("multiply_bytes", BYTES)):
            for call, seconds in (self._run(kernel, self._units) for _ in range(3)):
                self.peaks[products] = max(self.peaks[products], call.operations / seconds)
        self.peaks[LONG] = self.peaks[BYTES] / 2

    def reading(self) -> float:
        """Bytes a second at which all threads read memory."""
        return len(self._memory) / self._run("read_memory", len(self._memory) // UNIT)[1]

    @property
    def typical_reading(self) -> float:
        """The median over kernels of their `reading`."""
        return statistics.median(self.readings)


def seconds_of(entry: Any, address: int, wide: bool = True) -> float:
    """Seconds of a call; with one thread its CPU time, which other processes change less."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    entry(address, wide)
    return now() - start


def measure(case: Case, limits: Machine, turns: int) -> Measured:
    """Time a kernel and reading alone in turns."""
    times, readings = [], []
    for turn in range(turns + 1):
        entry, address, keep = case.prepare()
        reading = limits.reading()
        seconds = seconds_of(entry, address, case.wide)
        del keep
        if turn:  # the first one is not counted
            times.append(seconds)
            readings.append(reading)
    limits.update_peaks()
    return Measured(case, min(times), max(readings), limits)


def rows(measured: Iterable[Measured]) -> list[list[str]]:
    return [
        [
            f"experts, {m.case.name}" if m.case.group == "experts" else m.case.name,
            f"{m.case.tokens}",
            f"{m.case.nbytes / 1e6:.3g}",
            f"{m.case.operations / 1e6:.3g}",
            f"{m.seconds * 1e6:.0f}",
            f"{m.case.nbytes / m.seconds / 1e9:.1f}",
            f"{m.case.operations / m.seconds / 1e9:.3g}",
            f"{m.reading / 1e9:.1f}",
            m.limit,
            f"{m.share:.0%}",
        ]
        for m in measured
    ]


def spread(places: list[float], least: float, most: float) -> list[float]:
    """Move ascending places down, so that they have a distance and are not above `most`."""
    moved: list[float] = []
    for place in reversed(places):
        moved.append(min(place, moved[-1] - least if moved else most))
    return moved[::-1]


def draw_panel(axes: Any, title: str, points: list[Measured], limits: Machine) -> None:
    """One panel: the roofs, and a labelled point for each kernel."""
    import numpy as np

    x = np.geomspace(0.3, 3000, 200)
    for name, peak in limits.peaks.items():
        roof = np.minimum(x * limits.typical_reading, peak) / 1e9
        axes.plot(x, roof, color=COLOURS[name], linewidth=1.2, alpha=0.8)
    points = sorted(points, key=lambda m: m.case.operations / m.seconds)
    heights = [float(np.log10(m.case.operations / m.seconds / 1e9)) for m in points]
    # Labels stand below the roofs: to the right of the points, or where there is no room, left.
    reached = [m.case.operations / m.case.nbytes for m in points]
    left = statistics.median(reached) > 60
    column = min(reached) / 4 if left else max(reached) * 4
    most = float(np.log10(min(limits.peaks.values()) / 1e9)) - 0.25
    least = min(0.14, (most - math.log10(BOTTOM)) / len(points))
    for m, x_of, height in zip(points, reached, spread(heights, least, most), strict=True):
        at = x_of, m.case.operations / m.seconds / 1e9
        axes.plot(*at, "o", color=COLOURS[m.case.products], markersize=4.5, zorder=3)
        axes.annotate(
            f"{m.case.name}  {m.share:.0%}", at, (column, 10**height), fontsize=6.5, va="center",
            ha="right" if left else "left",
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkB": 3,
                        "relpos": (1.0 if left else 0.0, 0.5)},
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(0.3, 3000), ylim=(BOTTOM, 4000))
    axes.set_title(title, fontsize=9.5, loc="left", weight="bold")
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plot(measured: list[Measured], limits: Machine, paths: list[Path], threads: int) -> None:
    """Draw operations a second over operations a byte, experts by number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    matplotlib.rcParams["svg.hashsalt"] = "greenroom"
    panels: dict[str, list[Measured]] = {}
    for m in measured:
        if m.case.group == "experts":
            name = f"Experts, {m.case.tokens} token{'s' * (m.case.tokens > 1)}"
            panels.setdefault(name, []).append(m)
        elif m.case.tokens == 1 and m.limit != "call":
            panels.setdefault("Other kernels, one token", []).append(m)
    figure, grid = plt.subplots(2, 2, figsize=(10, 11), sharex=True, sharey=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, points) in zip(grid.flat, panels.items(), strict=False):
        draw_panel(axes, title, points, limits)
    for axes in grid[:, 0]:
        axes.set_ylabel("Gop/s")
    for axes in grid[-1]:
        axes.set_xlabel("operations a byte")
    lines = [
        Line2D([], [], color=colour, marker="o", markersize=4.5, label=f"{name}: {peak:,.0f} Gop/s")
        for name, colour in COLOURS.items()
        for peak in (limits.peaks[name] / 1e9,)
    ]
    of_threads = f"{threads} thread{'s' * (threads > 1)}, {library().variant}"
    title = f"{of_threads}; memory: {limits.typical_reading / 1e9:.0f} GB/s; peak of products of"
    figure.legend(handles=lines, title=title, loc="outside upper left", ncols=3, frameon=False,
                  alignment="left")  # fmt: skip
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="every kernel beside memory and arithmetic")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=15, help="timed calls of each kernel")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS, metavar="NAME")
    parser.add_argument(
        "--plot", type=Path, nargs="+", default=[], metavar="FILE", help="SVG or PNG to write"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    args = parser.parse_args()
    if args.plot and find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is missing: pip install 'greenroom[bench]'")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"commit {commit()}; {machine()}; {args.threads} threads, {library().variant}\n")
    limits, measured = Machine(args.quick), []
    with torch.no_grad():
        for case in all_cases(QUICK if args.quick else Sizes(), tuple(args.formats)):
            gc.collect()
            measured.append(measure(case, limits, args.turns))
            limits.readings.append(measured[-1].reading)
            note(f"{case.group} {case.name} {case.tokens}: {measured[-1].share:.0%}")
            case.prepare = lambda: (None, 0, None)  # its tensors are not needed any more
    print(table(COLUMNS, rows(measured)))
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in limits.peaks.items())
    region, call = (limits.call_s[wide] * 1e6 for wide in (True, False))
    print(f"\nreading alone {limits.typical_reading / 1e9:.1f} GB/s; Gop/s peak: {peaks};")
    print(f"empty call {region:.1f} us on all threads, {call:.1f} us on one")
    if args.plot:
        plot(measured, limits, args.plot, args.threads)


if __name__ == "__main__":
    main()
