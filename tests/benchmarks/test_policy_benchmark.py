"""The benchmark of policies: broken rules are refused by name, and the score is as defined."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenroom.config import TopicsConfig
from greenroom.policies import POLICIES, policy
from greenroom.sim.replay import replay
from greenroom.trace import Trace, load, save, stream
from greenroom.trace.synth import topics
from tests.benchmarks.harness import FOLDER
from tests.study.test_published import write

HERE = FOLDER / "policies"
RECORDINGS = Path(__file__).parents[3] / "shared" / "traces"
BASE = """
from itertools import count
from typing import NamedTuple
import numpy as np
from numba import njit
from greenroom.core.policy import Policy, compiled

BUILT = count(1)

class State(NamedTuple):
    age: np.ndarray
    sign: np.ndarray
    pieces: np.ndarray

def build_state(setup):
    return State(np.zeros(setup.pieces, np.int64), np.array([1]), setup.trace.pieces)

@compiled
def use(cache, state, piece, now):
    state.age[piece] = now.index * state.sign[0]

@compiled
def victim(cache, state, group, piece, now):
    oldest = -1
    for slot in range(cache.first[group], cache.first[group + 1]):
        other = cache.piece_in[slot]
        if cache.pinned[other] == 0 and (oldest < 0 or state.age[other] < state.age[oldest]):
            oldest = other
    return oldest

policy = Policy("mine", build_state, victim, use, use)
"""
CHOSEN = "    return oldest\n"
# How a policy breaks a rule (text replaced in BASE), and the message that names the rule.
CHEATS = {
    "pinned": ("cache.pinned[other] == 0 and ", "", "evicts a pinned expert"),
    "nothing": (CHOSEN, "    return -1\n", "exceeds the capacity: it chooses no victim"),
    "absent": (CHOSEN, "    return piece\n", "exceeds the capacity: its victim is not in"),
    "no expert": (CHOSEN, "    return 1 << 30\n", "chooses a victim that is not an expert"),
    "bigger cache": (
        CHOSEN, "    cache.slot_of[(oldest + 1) % cache.slot_of.size] = 0\n" + CHOSEN,
        "exceeds the capacity: its victim is not in",
    ),
    "future": (
        "    oldest = -1\n",
        "    oldest = -1\n    ahead = min(now.index + 9, state.pieces.size - 1)\n"
        "    state.age[state.pieces[ahead]] = now.index\n",
        "looks into the future: its victim at request",
    ),
    "says so": ('use, use)', 'use, use, needs_trace=True)', "looks into the future: it says so"),
    "fixed set": (
        'use, use)', 'use, use, preload=lambda setup: np.arange(1))', "does not insert every miss",
    ),
    "chance": ("    oldest = -1\n", "    oldest = -1\n    if np.random.random() < 0.1:\n"
               "        state.age[:] = 0\n", "is not deterministic"),
    "memory": (
        "np.array([1])", "np.array([(-1) ** next(BUILT)])", "is not deterministic: a second replay",
    ),
    "types": ("= now.index", "= now.nothing",
              "does not compile"),
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts of the folder, imported as they import one another."""
    names = ("referee", "cells", "check", "recordings")
    monkeypatch.syspath_prepend(str(HERE))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: __import__(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(BASE)
    return path


@pytest.fixture(scope="module")
def recording() -> Trace:
    return topics(TopicsConfig(layers=3, experts=20, top_k=3, tokens=400, requests=9))


def arguments(file: Path, folder: Path, **more: Any) -> Any:
    facts = {"policy": str(file), "traces": folder, "json": None, "rules": False, "workers": 1}
    return SimpleNamespace(**{**facts, "recordings": ["one"], **more})


@pytest.mark.parametrize("name", ["lru", "next-use", "random", "s3fifo", "moe-infinity"])
@pytest.mark.parametrize("pin", ["none", "step"])
def test_the_referee_counts_what_the_replay_counts(modules, recording, name, pin) -> None:
    requests = stream(recording, "natural")
    for capacity in (2, 7, 30):
        plain = replay(requests, recording.offsets, capacity, policy(name), pin=pin, seed=3)
        verdict = modules.referee.judge(
            policy(name), requests, recording.offsets, capacity, pin, seed=3
        )
        assert verdict.misses == plain.misses
        assert (verdict.victims >= 0).sum() == plain.misses - capacity


def test_a_policy_that_keeps_the_rules_passes(modules, mine: Path, capsys) -> None:
    assert modules.check.main(arguments(mine, mine.parent, rules=True)) == 0
    assert capsys.readouterr().out == "mine keeps the rules on 1 trace\n"


@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if not p.needs_trace])
def test_greenroom_s_policies_keep_the_rules(modules, name: str) -> None:
    modules.referee.check_rules(policy(name), modules.check.topics(modules.check.SMALL), 0)


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_policy_that_breaks_a_rule_is_refused_by_name(modules, mine, cheat, capsys) -> None:
    old, new, message = CHEATS[cheat]
    assert old in BASE
    mine.write_text(BASE.replace(old, new))
    assert modules.check.main(arguments(mine, mine.parent, rules=True)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(f"check: {mine} {message}"), err


def test_other_misses_than_the_victims_make_are_refused(modules, recording, monkeypatch) -> None:
    """As if a policy had changed the arrays of the cache."""
    monkeypatch.setattr(modules.referee, "replay", lambda *a, **k: SimpleNamespace(misses=4))
    requests = stream(recording.head(1), "natural")
    with pytest.raises(modules.referee.RuleError, match="changes the arrays of the cache"):
        modules.referee.judge(policy("lru"), requests, recording.offsets, 60, "none")


def test_the_row_has_the_cells_that_gap_py_defines(
    modules, mine, recording, tmp_path: Path, capsys, monkeypatch
) -> None:
    save(recording, tmp_path / "one.trace")
    digest = modules.cells.digest_of(recording)
    monkeypatch.setitem(modules.cells.RECORDINGS, "one", {"sha256": digest})
    out = tmp_path / "row.json"
    assert modules.check.main(arguments(mine, tmp_path, json=out)) == 0
    facts = json.loads(out.read_text())
    expected = []
    for percent in (20, 40, 60):
        gaps = []
        for seed in (None, 1, 2):
            chosen = np.arange(1, recording.requests, 2)
            if seed is not None:
                chosen = np.random.default_rng(seed).permutation(chosen)
            requests = stream(recording.select(chosen), "natural")
            lru, own, opt = (
                replay(requests, recording.offsets, 60 * percent // 100, each, pin="none").misses
                for each in (policy("lru"), policy(str(mine)), policy("opt"))
            )
            gaps.append((lru - own) / (lru - opt))
        expected.append(np.mean(gaps))
    assert facts["gap_closed"]["one"] == pytest.approx(expected)
    assert facts["score"] == pytest.approx(np.mean(expected))
    assert len(facts["cells"]) == 9
    cells = " / ".join(f"{100 * gap:.1f}" for gap in expected)
    score = f"{100 * np.mean(expected):.1f}"
    assert capsys.readouterr().out == f"| mine | {cells} | {score} |\n"


def test_another_recording_is_refused(modules, mine, recording, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(modules.cells.RECORDINGS, "one", {"sha256": "0" * 64})
    assert modules.check.main(arguments(mine, tmp_path)) == 2
    assert "one.npz is missing: docs/benchmark.md" in capsys.readouterr().err
    save(recording, tmp_path / "one.trace")
    assert modules.check.main(arguments(mine, tmp_path)) == 2
    assert "one.trace is another recording: its routing has the SHA-256" in capsys.readouterr().err


def test_a_file_without_a_policy_is_one_line(modules, tmp_path: Path, capsys) -> None:
    assert modules.check.main(arguments(tmp_path / "none.py", tmp_path, rules=True)) == 2
    assert "none.py cannot be read" in capsys.readouterr().err


def test_recordings_are_made_from_clones(modules, tmp_path, capsys, monkeypatch) -> None:
    clone, out = tmp_path / "clone", tmp_path / "out"
    write(clone / "inside", "moe-beyond", ("a", "b", "c"))
    facts = {
        "format": "moe-beyond", "folder": "inside", "repository": "r", "commit": "abc",
        "files": ["b/prompt_1_data.csv", "a/prompt_1_data.csv"], "sha256": "0" * 64,
    }  # fmt: skip
    monkeypatch.setitem(modules.cells.RECORDINGS, "one", facts)
    args = SimpleNamespace(clones=[f"one={clone}"], out=out)
    assert modules.recordings.main(args) == 2
    said = capsys.readouterr().err
    assert "check out abc of r" in said
    facts["sha256"] = said.split("SHA-256 ")[1][:64]
    assert modules.recordings.main(args) == 0
    assert modules.cells.digest_of(load(out / "one.trace")) == facts["sha256"]
    assert load(out / "one.trace").labels == ("b", "a")
    args.clones = ["two=x"]
    assert modules.recordings.main(args) == 2
    assert "two is no recording: there are olmoe-1b-7b" in capsys.readouterr().err


def test_the_definitions_name_files_and_licences(modules) -> None:
    assert list(modules.cells.RECORDINGS) == ["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"]
    page = (FOLDER.parent / "docs" / "benchmark.md").read_text()
    for name, facts in modules.cells.RECORDINGS.items():
        assert len(set(facts["files"])) == len(facts["files"])
        for part in (name, facts["repository"], facts["commit"], facts["licence"]):
            assert part in page, part


def test_the_page_has_the_measured_rows_in_their_order(modules) -> None:
    page = (FOLDER.parent / "docs" / "benchmark.md").read_text()
    rows = json.loads((HERE / "rows.json").read_text())
    texts = [modules.cells.row_of(name, means) for name, means in rows.items()]
    scores = [modules.cells.score_of(means) for means in rows.values()]
    assert scores == sorted(scores, reverse=True)
    assert "\n".join(texts) in page
    assert {n for n, p in POLICIES.items() if not p.needs_trace} - {"lru"} <= set(rows)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_the_digests_are_those_of_the_recordings(modules, name: str) -> None:
    if not (path := RECORDINGS / f"{name}.npz").is_file():
        pytest.skip(f"{path} is not here")
    assert modules.cells.digest_of(load(path)) == modules.cells.RECORDINGS[name]["sha256"]


BLOCKED = """
import sys
sys.path[:0] = {paths}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {allowed} and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import check
from pathlib import Path
from types import SimpleNamespace
args = SimpleNamespace(policy={policy!r}, rules=True, traces=None, recordings=[], json=None,
                       workers=1)
sys.exit(check.main(args))
"""


def test_the_checker_needs_numpy_and_numba_alone(mine: Path) -> None:
    own = ["check", "cells", "referee", "greenroom", "greenroom_policy_mine"]
    code = BLOCKED.format(
        paths=[str(HERE), str(FOLDER.parent / "src")], policy=str(mine),
        allowed={*own, "numpy", "numba", "llvmlite"},
    )  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "mine keeps the rules on 1 trace\n", ran.stderr


def test_the_page_s_policy_keeps_the_rules(modules, tmp_path: Path, capsys) -> None:
    """The example of docs/benchmark.md, as its reader copies it."""
    page = (FOLDER.parent / "docs" / "benchmark.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python mine.py\n")[2].partition("```")[0])
    assert modules.check.main(arguments(tmp_path / "mine.py", tmp_path, rules=True)) == 0
    assert "keeps the rules" in capsys.readouterr().out
