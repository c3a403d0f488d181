"""A first run on a GPU, as one command: tests, kernels, models and the demo, into a folder.

    python benchmarks/gpu_report --out DIR                  # all parts that are not complete yet
    python benchmarks/gpu_report --out DIR --part kernels   # one part
    python benchmarks/gpu_report --out DIR --smoke          # a dry run on a CPU: no figures

Parts are tests, kernels, models and demo; each ends within --minutes. What was not reached is
noted, and the same command goes on there: results.jsonl in DIR has every cell that is complete.
Needs the repository, torch with CUDA and Triton, and no network. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import page
import shapes
from ledger import FAILED, FINAL, NOT_MEASURED, Ledger

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
MINUTES = 9.0
CLOSING_S = 20.0  # of a part's time: for what runs to end, and the summary
LEAST_S = 5.0  # no worker is started for less
NOTHING_HERE = 4  # a worker's exit code: this machine cannot be measured
CRASHES = 6  # of a part's workers, before it is given up


@dataclass(frozen=True)
class Options:
    """Options of a part; `until` is a time of the clock."""

    out: Path
    scratch: Path
    until: float
    run: str
    smoke: bool = False


def worker_command(part: str, options: Options) -> list[str]:
    """The command that measures a part's open cells, one after another."""
    command = [sys.executable, str(FOLDER / "worker.py"), part, "--out", str(options.out)]
    command += ["--scratch", str(options.scratch), "--run", options.run]
    command += ["--until", str(options.until)]
    return [*command, "--smoke"] if options.smoke else command


def environment(smoke: bool) -> dict[str, str]:
    """The environment of the workers: this repository's code, offline, nothing learned."""
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "GREENROOM_LEARNED": "off",
        "PYTHONUNBUFFERED": "1", "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    if smoke:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return {**os.environ, **variables}


def measure(part: str, options: Options, ledger: Ledger) -> None:
    """Measure a part in processes of its own, so that a crash costs one cell; stop in time."""
    cells, log = shapes.cells(part, options.smoke), options.out / "log.txt"
    for _ in range(CRASHES):
        if not ledger.open_cells(part, cells, options.run):
            break
        if time.time() > options.until - LEAST_S:
            break
        with log.open("ab") as output:
            worker = subprocess.Popen(
                worker_command(part, options), env=environment(options.smoke), cwd=ROOT,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            code: int | None = worker.wait(max(0.0, options.until - time.time()) + CLOSING_S / 2)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(worker)
        if code == NOTHING_HERE:
            raise SystemExit(f"gpu_report: {last(log)}")
        for cell in ledger.begun(part, options.run):
            if code is None:
                ledger.write(part, cell, NOT_MEASURED, options.run, reason="the time was up")
            else:
                ledger.write(part, cell, FAILED, options.run, reason=f"{ended(code)}: {last(log)}")
    for cell in ledger.open_cells(part, cells, options.run):
        up = time.time() > options.until - LEAST_S
        reason = "the time was up" if up else f"not reached: {last(log)}"
        ledger.write(part, cell, NOT_MEASURED, options.run, reason=reason)


def end(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def ended(code: int) -> str:
    """A description of how a worker ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last(log: Path) -> str:
    """The last line that a worker wrote."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results, read and added")
    parser.add_argument("--part", nargs="+", choices=shapes.PARTS, default=shapes.PARTS)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that a part takes")
    parser.add_argument("--scratch", type=Path, help="folder for the models, 12 GB (default: /tmp)")
    parser.add_argument("--smoke", action="store_true", help="a dry run on a CPU, tiny")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all cells of the parts are complete, 1 some are not."""
    args = parsed(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    scratch = args.scratch or Path(os.environ.get("TMPDIR", "/tmp")) / "greenroom-gpu-report"
    scratch.mkdir(parents=True, exist_ok=True)
    ledger, run, short = Ledger(args.out.resolve()), str(time.time_ns()), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worker ends too
    try:
        for part in args.part:
            begin, until = time.time(), time.time() + args.minutes * 60 - CLOSING_S
            options = Options(args.out.resolve(), scratch.resolve(), until, run, args.smoke)
            measure(part, options, ledger)
            page.write(options.out, options.smoke)
            cells, rows = shapes.cells(part, args.smoke), ledger.rows()
            states = [rows[part, cell]["status"] for cell in cells]
            complete = sum(state in FINAL for state in states)
            short += len(cells) - complete
            took = time.time() - begin
            print(f"{part}: {complete} of {len(cells)} cells, {took:.0f} s", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{args.out / 'summary.md'}" + (f"; {short} cells to go" if short else ""))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
