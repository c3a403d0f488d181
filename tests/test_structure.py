"""The limits of the structure: files, functions, folders and lines stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "greenroom"
KERNELS = Path(__file__).parents[1] / "native"
FILE, FUNCTION, FOLDER, LINE = 400, 60, 15, 100
TABLES = {"policies", "predictors", "cli", "hf/adapters", "runtime/encodings", "core/options"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def kernels() -> list[Path]:
    """The C++ sources."""
    return sorted(KERNELS.rglob("*.[ch]pp"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file and its lines, those of functions within it left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [
                n for n in ast.walk(node)
                if n is not node and isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]  # fmt: skip
            lines = {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            for each in inner:
                lines -= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
            yield node.name, len(lines)


def test_no_file_is_long() -> None:
    files = [*sources(), *kernels()]
    lengths = {str(p.relative_to(ROOT.parents[1])): len(p.read_text().splitlines()) for p in files}
    assert not {n: lines for n, lines in lengths.items() if lines > FILE}


def test_no_line_is_long() -> None:
    long = [
        f"{p.relative_to(ROOT.parents[1])}:{number}"
        for p in (*sources(), *kernels())
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if len(line.split("  # type:")[0]) > LINE
    ]
    assert not long


def test_no_function_is_long() -> None:
    long = {
        f"{p.relative_to(ROOT)}:{name}": n
        for p in sources()
        for name, n in functions(p)
        if n > FUNCTION
    }
    assert not long


def test_no_folder_is_large() -> None:
    """Tables, of one row a file, may be longer."""
    sizes = {}
    for folder in sorted({p.parent for p in sources()}):
        name = folder.relative_to(ROOT).as_posix()
        count = sum(p.name != "__init__.py" for p in folder.glob("*.py"))
        if name not in TABLES and count > FOLDER:
            sizes[name] = count
    assert not sizes


@pytest.mark.parametrize("folder", sorted({str(p.parent.relative_to(ROOT)) for p in sources()}))
def test_a_folder_says_what_is_in_it(folder: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))


def test_raw_addresses_stay_out_of_the_core() -> None:
    """Neither ctypes nor an array's address."""
    names = {"ctypes", "buffer_info", "data_ptr", "__array_interface__"}
    problems = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Import) and names & {alias.name for alias in node.names})
        or (isinstance(node, ast.ImportFrom) and node.module in names)
    ]
    assert not problems


def test_only_the_core_looks_into_the_scheduler() -> None:
    """Others have its methods and `view`; `StepTimer` scripts its cache."""
    parts = {"placement", "transfers", "lookahead", "prefetcher", "cache", "counts", "pieces"}
    problems = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if ROOT / "core" not in path.parents and path != ROOT / "sim" / "timed.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in parts
        and "scheduler" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
    ]
    assert not problems
