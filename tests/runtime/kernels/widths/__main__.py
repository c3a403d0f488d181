"""Run every format and every kernel at every width.

    python -m tests.runtime.kernels.widths [--only TEXT]

A read beyond an array's end kills the process; the last line of the output is then the case, with
the widths up to the one that failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from tests.runtime.kernels.widths.cases import CASES, check_case
from tests.runtime.kernels.widths.formats import ALL, EVERY_STYLE, check_style

Check = Callable[[int, bool], None]


def all_checks() -> Iterator[tuple[str, Check, Iterable[int]]]:
    """Name, check of a width, and widths, of each format and each kernel."""
    for style in EVERY_STYLE:
        yield f"format-{style}-{style.share[1]}", partial(check_style, style), ALL
    for case in CASES:
        yield str(case), partial(check_case, case), case.many


def main() -> int:
    """Run the checks; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Every kernel at every width, between walls.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    only, failures = parser.parse_args().only, 0
    torch.set_num_threads(1)
    faulthandler.enable()
    for name, check, widths in all_checks():
        if only not in name:
            continue
        print(name, end=":", flush=True)
        for width in widths:
            print(end=f" {width}", flush=True)
            for at_end in (True, False):
                try:
                    check(width, at_end)
                except AssertionError:
                    failures += 1
                    print(f" FAILED (walls {'behind' if at_end else 'before'} the arrays)")
                    traceback.print_exc(file=sys.stdout)
        print()
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
