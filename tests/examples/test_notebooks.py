"""The notebooks of examples/ run, cell by cell, and have no outputs of a machine."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.trace import save
from tests.sim.small import trace

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_of(path: Path) -> list[str]:
    """The sources of a notebook's code cells."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(path: Path) -> dict[str, Any]:
    """Execute a notebook as Jupyter does; `_` is the value of the last cell with one."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_of(path)):
        tree = ast.parse(source, f"{path.name}, code cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}:{number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
            names["_"] = value
    return names


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def test_there_are_three() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"compare_policies", "own_policy", "size_a_machine"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_short(path: Path) -> None:
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"]) <= 20
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert max(len(line) for source in code_of(path) for line in source.splitlines()) <= 100


def test_policies_are_compared(drawing: None) -> None:
    names = run(ROOT / "examples" / "compare_policies.ipynb")
    assert [row["policy"] for row in names["results"]][::4] == [
        "lru", "lfu", "llru", "next-use", "opt",
    ]  # fmt: skip
    assert names["frame"]["gap_closed"].between(-5, 1).all()
    assert Path("run.oracleGeneral.bin").stat().st_size == 24 * names["results"][0]["requests"]
    again = names["study"].load_parquet("run.parquet")
    assert (again.experts == names["trace"].experts).all()


def test_a_machine_is_sized(drawing: None) -> None:
    names = run(ROOT / "examples" / "size_a_machine.ipynb")
    speeds = names["speeds"]
    assert speeds.shape == (5, 3)
    assert (speeds.diff().dropna() >= 0).all().all()  # more memory is not slower
    slow, fast = speeds["SATA, 0.5 GB/s"], speeds["NVMe, 12 GB/s"]
    assert (slow.iloc[:-1] < fast.iloc[:-1]).all()
    least = names["_"]
    assert least["NVMe, 12 GB/s"] <= least["NVMe, 3 GB/s"]


def test_an_own_policy_beats_lru_in_30_lines(drawing: None) -> None:
    path = ROOT / "examples" / "own_policy.ipynb"
    names = run(path)
    (cell,) = (source for source in code_of(path) if "def victim" in source)
    lines = [line for line in cell.splitlines() if line.strip()]
    assert len(lines) <= 30
    misses = {(r["policy"], r["capacity"]): r["misses"] for r in names["results"]}
    slots = sorted({capacity for _, capacity in misses})
    assert all(misses["opt", n] <= misses["fading-uses", n] for n in slots)
    assert misses["fading-uses", slots[0]] < misses["lru", slots[0]]


def test_the_python_of_the_page_runs(drawing: None) -> None:
    page = (ROOT / "docs" / "study.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    save(trace([[-9, *[1] * 30]]), "run.trace")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/study.md", "exec"), names)
    assert len(names["results"]) == 6
