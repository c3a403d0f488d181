"""SECURITY.md names tests that exist, at least one for each promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def names_of(path: Path) -> set[str]:
    """The tests of a file: functions, and methods as `Class::test`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body
                      if isinstance(each, ast.FunctionDef)}  # fmt: skip
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_the_tests_that_it_names_exist() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named
               if not (ROOT / file).exists() or name not in names_of(ROOT / file)]  # fmt: skip
    assert not missing


def test_every_promise_has_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise |")]
    assert promises
    assert not [row for row in promises if not NAMED.search(row)]
