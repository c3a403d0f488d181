"""`greenroom doctor`: measure this machine, and save what `simulate --machine` takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.config import show_bytes

if TYPE_CHECKING:
    from greenroom.core.machine import Machine, Table

HELP = "measure this machine: memory, disk, kernels"


def add_to(commands: Any) -> None:
    parser = commands.add_parser("doctor", help=HELP, description=HELP)
    parser.add_argument("--quick", action="store_true", help="less exact, in under 20 seconds")
    parser.add_argument(
        "--path", metavar="PATH", type=Path,
        help="the disk to measure: a model's folder or file, which is read, or a folder to write a"
        " temporary file in (default: where models are downloaded to)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path,
        help="save the profile here (default: where simulate --machine auto looks for it,"
        f" {default_profile()})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the profile, nothing else")
    parser.set_defaults(main=main)


def default_profile() -> Path:
    """The profile of this machine, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom" / "machine.json"


def main(args: argparse.Namespace) -> None:
    from greenroom.cli.output import check_target, write_whole

    target = args.output or default_profile()
    if args.output is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    check_target(target)

    from greenroom.runtime.doctor import QUICK, THOROUGH, examine

    shown = not args.json and sys.stderr.isatty()
    machine = examine(args.path, QUICK if args.quick else THOROUGH, _say if shown else _silent)
    if shown:
        _say("")
    write_whole(target, json.dumps(machine.as_json(), indent=1) + "\n")
    if args.json:
        print(json.dumps(machine.as_json()))
    else:
        print(table(machine))
    print(f"saved to {target}: greenroom simulate --machine takes it", file=sys.stderr)


def _silent(text: str) -> None:
    pass


def _say(text: str) -> None:
    """What is under way, in one line that the next one replaces."""
    print(f"\r\x1b[2K{text}" + (" ..." if text else ""), end="", file=sys.stderr, flush=True)


def table(machine: Machine) -> str:
    """All figures, for people."""
    from greenroom.cli.output import columns

    host, measured = machine.host, machine.measured
    disk, link = measured["disk"], machine.routes[0].link
    lines = [
        f"{host['cpu']}, {host['cores']} cores ({' '.join(host['instructions']) or 'plain'}),"
        f" {show_bytes(host['memory_bytes'])} of memory, torch {host['torch']},"
        f" load {host['load']:.1f}",
        "",
        columns(
            ("memory read", "GB/s"),
            [(f"{n} thread{'s' * (n != '1')}", f"{rate / 1e9:.1f}") for n, rate in
             measured["memory"].items()],
        ),
        "",
    ]  # fmt: skip
    rates = {(read["nbytes"], read["threads"]): read["bandwidth"] for read in disk["reads"]}
    threads = sorted({n for _, n in rates})
    kind = "past the page cache" if disk["direct"] else "through the page cache, cold"
    lines += [
        columns(
            ("disk, GB/s", *(f"{n} thread{'s' * (n > 1)}" for n in threads)),
            [
                (show_bytes(size), *(f"{rates[size, n] / 1e9:.2f}" for n in threads))
                for size in sorted({size for size, _ in rates})
            ],
        ),
        f"random reads {kind}, in {disk['path']}; as a link: {link.bandwidth / 1e9:.2f} GB/s,"
        f" latency {link.latency * 1e6:.0f} us, {link.lanes} lanes",
        "",
    ]
    for processor in machine.processors:
        lines += [
            _times(f"{processor.name}, one expert", processor.expert),
            "",
            _times(f"{processor.name}, one dense layer", processor.dense),
            "",
        ]
    return "\n".join([*lines, f"{measured['seconds']:.1f} s"])


def _times(title: str, times: Table) -> str:
    from greenroom.cli.output import columns

    return columns(
        (f"{title}, ms", *(f"{n} token{'s' * (n > 1)}" for n in times.tokens)),
        [
            (show_bytes(size), *(f"{seconds * 1e3:.3f}" for seconds in row))
            for size, row in zip(times.nbytes, times.seconds, strict=True)
        ],
    )
