"""No schedule of the threads of driver, engine and their workers fails.

hypothesis chooses a workload, and the schedule as a seed or as a list of choices. `make check` runs
a third of `EXAMPLES` of each scenario, `make ci` all; `make soak` many more by seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.schedules.run import main, parse_choices
from tests.schedules.scenarios import SCENARIOS, ready
from tests.schedules.scheduler import Failure
from tests.schedules.strategies import Replay

EXAMPLES = 28  # of 11 scenarios: 308 schedules
SEEDS = st.integers(0, 1 << 32)
# Steps between two choices that are not to go on, and the choices.
GAPS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 4)), max_size=30)


@pytest.fixture(scope="module", autouse=True)
def _ready() -> Iterator[None]:
    with ready():
        yield


def replay(gaps: list[tuple[int, int]]) -> Replay:
    steps = accumulate(gap for gap, _ in gaps)
    return Replay(zip(steps, (index for _, index in gaps), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
@given(seed=SEEDS, gaps=st.one_of(st.none(), GAPS))
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_schedule_fails(name: str, seed: int, gaps: list[tuple[int, int]] | None) -> None:
    try:
        SCENARIOS[name].run(seed, None if gaps is None else replay(gaps))
    except Failure as failure:
        listed = ",".join(f"{step}:{index}" for step, index in failure.choices)
        note(f"python -m tests.schedules.run {name} --seed {seed} --choices '{listed}'")
        raise


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_repeats_its_schedule(name: str) -> None:
    first, again = (SCENARIOS[name].run(1) for _ in range(2))
    assert (first.choices, first.step) == (again.choices, again.step)
    replayed = SCENARIOS[name].run(1, Replay(first.choices))
    assert (replayed.choices, replayed.step) == (first.choices, first.step)


def test_runs_add_up(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("GREENROOM_SOAK_COUNTS", str(tmp_path / "counts.json"))
    for total in (2, 4):
        assert main(["predictions", "host-jobs", "--schedules", "2"]) == 0
        assert f"since the first run: {total}" in capsys.readouterr().out
    assert main(["host-jobs", "--seed", "1"]) == 0
    assert "host-jobs, seed 1: " in capsys.readouterr().out
    assert parse_choices("40:1,95:2") == ((40, 1), (95, 2))
