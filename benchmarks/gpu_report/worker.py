"""A worker of the report: measures the open cells of one part until the time is up.

Started by __main__.py. It ends with code 3 after a cell that failed, since a GPU does not recover
within a process; the next worker goes on with the next cell.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

import shapes
from ledger import (
    BEGUN,
    DONE,
    FAILED,
    LEFT_OUT,
    MACHINE,
    NOT_MEASURED,
    CutShort,
    Ledger,
    NotHere,
)

MODULES = {
    "tests": "test_cells",
    "kernels": "kernel_cells",
    "models": "model_cells",
    "demo": "demo_cells",
}
AGAIN, NOTHING_HERE = 3, 4  # exit codes
DEATH_SIGNAL = 1  # of prctl: the signal that comes when the parent ends


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=shapes.PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # nothing goes on behind a report's back
    ledger = Ledger(args.out)
    cells = ledger.open_cells(args.part, shapes.cells(args.part, args.smoke), args.run)
    import machine
    import torch

    if args.smoke:
        torch.set_num_threads(1)

    ledger.write(MACHINE, "here", DONE, args.run, values=machine.described(args.smoke))
    if not args.smoke and (missing := machine.missing()):
        print(missing, flush=True)
        return NOTHING_HERE
    part: Any = import_module(MODULES[args.part]).Cells(args, ledger)
    for cell in cells:
        if time.time() >= args.until:
            return 0
        if not measured(ledger, args, part, cell):
            return AGAIN
    return 0


def measured(ledger: Ledger, args: argparse.Namespace, part: Any, cell: str) -> bool:
    """Measure one cell and write its results; False where it failed."""
    ledger.write(args.part, cell, BEGUN, args.run)
    print(f"{args.part}, {cell}", flush=True)
    begin = time.time()
    try:
        values = part.measure(cell)
    except NotHere as why:
        ledger.write(args.part, cell, LEFT_OUT, args.run, reason=str(why))
        return True
    except CutShort as cut:
        ledger.write(args.part, cell, NOT_MEASURED, args.run, reason=str(cut), values=cut.values)
        return True
    except subprocess.TimeoutExpired:
        reason = "the time was up"
        ledger.write(args.part, cell, NOT_MEASURED, args.run, reason=reason)
        return True
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        ledger.write(args.part, cell, FAILED, args.run, reason=reason)
        return False
    seconds = round(time.time() - begin, 3)
    ledger.write(args.part, cell, DONE, args.run, seconds=seconds, values=values)
    return True


if __name__ == "__main__":
    sys.exit(main())
