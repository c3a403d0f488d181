"""Every script of `benchmarks/` runs: exit code 0, its columns, finite figures, its files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.benchmarks import harness
from tests.benchmarks.table import LIBCACHESIM, MATPLOTLIB, ROWS, Row

pytestmark = [pytest.mark.bench_smoke, pytest.mark.timeout(600)]


def command(row: Row, inputs: dict[str, Path], request: pytest.FixtureRequest) -> list[str]:
    """The row's arguments, with paths for the names in braces."""
    paths = {**inputs, "out": request.getfixturevalue("tmp_path")}
    if "{pack}" in row.args:
        paths["pack"] = request.getfixturevalue("packed")
    return [arg.format_map(paths) for arg in row.args.split()]


def cgroups() -> bool:
    """Can this process make a memory cgroup? A machine may forbid it."""
    sys.path.insert(0, str(harness.FOLDER))
    try:
        import memlimit

        with memlimit.memory_cgroup(1 << 28):
            return True
    except memlimit.CgroupError:
        return False
    finally:
        sys.path.remove(str(harness.FOLDER))
        sys.modules.pop("memlimit", None)


@pytest.mark.parametrize("row", [pytest.param(r, id=f"{n}-{r.name}") for n, r in enumerate(ROWS)])
def test_a_script_prints_finite_figures_and_writes_its_files(
    row: Row, inputs: dict[str, Path], request: pytest.FixtureRequest, capfd: pytest.CaptureFixture
) -> None:
    args = command(row, inputs, request)
    code = harness.run(row.script, args)
    if code == 0 and row.then:
        code = harness.run(row.script, [*args, *row.then.split()])
    out, err = capfd.readouterr()
    if row.needs and importlib.util.find_spec(row.needs) is None:
        assert code == f"{row.needs} is missing: pip install 'greenroom[bench]'"
        return
    if row.limited and not cgroups():
        assert (code, "cannot make a memory cgroup" in err) == (2, True)
        return
    assert code == 0, err
    harness.check_finite(out)
    if row.kind == "table":
        harness.check_table(out, row.columns)
    elif row.kind == "text":
        harness.check_text(out, row.columns)
    elif row.kind == "json":
        harness.check_json(out, row.columns)
    for name in row.writes:
        assert (request.getfixturevalue("tmp_path") / name).stat().st_size > 0


@pytest.mark.parametrize("needs", [MATPLOTLIB, LIBCACHESIM])
def test_a_missing_package_is_named_in_one_line(
    needs: str, inputs: dict[str, Path], request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, needs, None)  # as if it were not installed
    row = next(row for row in ROWS if row.needs == needs)
    code = harness.run(row.script, command(row, inputs, request))
    assert code == f"{needs} is missing: pip install 'greenroom[bench]'"
