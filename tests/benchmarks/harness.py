"""Run a script of `benchmarks/` in this process, and check its output.

Imports take seconds for each process, so scripts share one: each is executed as `__main__` with its
own `sys.argv` and `sys.path`, and leaves no module of its folder behind.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
NOT_FINITE = re.compile(r"(?<![\w.-])[+-]?(nan|inf|infinity)(?![\w.-])", re.IGNORECASE)


def run(script: str, args: list[str]) -> int | str:
    """Run a script; return its exit code or the message that it ends with."""
    path = FOLDER / script
    with as_program(path, args):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit_:
            return 0 if exit_.code is None else exit_.code
        finally:
            gc.collect()
    return 0


@contextmanager
def as_program(path: Path, args: list[str]) -> Iterator[None]:
    """Context with the arguments, path, environment and threads of a separate program."""
    argv, places, environment = sys.argv, list(sys.path), dict(os.environ)
    threads, modules = torch.get_num_threads(), set(sys.modules)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    os.environ["NUMBA_NUM_THREADS"] = str(numba.config.NUMBA_NUM_THREADS)  # no second number
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # of children, whose threads share the cores
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        for name in set(sys.modules) - modules:
            if FOLDER in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
                del sys.modules[name]


def check_table(text: str, columns: tuple[str, ...]) -> None:
    """Check that a line names the columns in this order, and figures follow it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if _has(line, columns):
            rows = _rows(lines[number + 1 :])
            assert rows, f"no rows below {line!r}"
            assert all(re.search(r"\d", row) for row in rows), rows
            return
    raise AssertionError(f"no line has {columns}:\n{text}")


def _has(line: str, columns: tuple[str, ...]) -> bool:
    at = 0
    for column in columns:
        at = line.find(column, at) + 1
        if not at:
            return False
    return True


def _rows(lines: list[str]) -> list[str]:
    """The rows of a table: lines up to an empty one, without the rule under the header."""
    table_rows: list[str] = []
    for line in lines:
        if set(line) <= set("|-: "):
            if table_rows and not line.strip():
                break
            continue
        table_rows.append(line)
    return table_rows


def check_text(text: str, phrases: tuple[str, ...]) -> None:
    """Check that each phrase stands in a line with a figure."""
    lines = [line for line in text.splitlines() if re.search(r"\d", line)]
    missing = [phrase for phrase in phrases if not any(phrase in line for line in lines)]
    assert not missing, f"{missing} not in {text!r}"


def check_json(text: str, columns: tuple[str, ...]) -> None:
    """Check that the last JSON object has these keys."""
    objects = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert objects, f"no object in {text!r}"
    assert set(columns) <= set(objects[-1]), objects[-1]


def check_finite(text: str) -> None:
    """Check that no figure is infinite or undefined."""
    wrong = [line for line in text.splitlines() if NOT_FINITE.search(line)]
    assert not wrong, wrong
