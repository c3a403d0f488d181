"""examples/simulate.py on a tiny trace, and the Python of docs/simulate.md."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import greenroom
from greenroom.trace import save
from tests.sim.small import trace

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("simulate_example", ROOT / "examples" / "simulate.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_compares_policies_and_says_what_they_close(script, capsys):
    found = script.compare(trace([[-9, *[1] * 30]]), ["lru", "fifo", "opt"], ["25%", "50%"])
    script.show_gap(found)
    out = capsys.readouterr().out
    assert found[0]["order"] == "runtime"
    assert re.search(r"^lru +4 +\(25%\)", out, re.MULTILINE)
    assert re.search(r"^fifo closes -?\d+% of the gap from LRU to OPT$", out, re.MULTILINE)


def test_it_plots(script, tmp_path):
    pytest.importorskip("matplotlib")
    found = greenroom.simulate(trace([[-9, 1, 1]]), "lru", ["25%", "50%"])
    script.plot(found, tmp_path / "misses.png")
    assert (tmp_path / "misses.png").stat().st_size > 1000


def test_the_python_of_the_docs_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "simulate.md").read_text()
    section = page.partition("## From Python")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    assert "greenroom.simulate(" in code
    save(trace([[-9, *[1] * 10]]), tmp_path / "run.trace")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "docs/simulate.md", "exec"), names)
    assert len(names["found"]) == 6  # type: ignore[arg-type]
