from __future__ import annotations

import pytest

from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim import sweep as sweeping
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.replay import replay
from greenroom.sim.study import Cell, Study, capacities, split_names
from greenroom.sim.sweep import sweep, sweep_on_ray
from greenroom.trace import stream
from tests.sim import small

TRACE = small.trace([[-5, 1, 1, 1], [-3, 1, 1]] * 30)
CELLS = [Cell(p, n, pin) for p in ("fifo", "lru") for n in (16, 3, 8) for pin in ("step", "none")]


COSTS = Costs((Link(1e6, 0.0),), Work.constant(0.001), Work.constant(0.002))
TIMED = Study.of(TRACE.head(40), "runtime", costs=COSTS, expert_bytes=1000, ahead=2)
AHEAD = [Cell("lru", 8), *(Cell("lru", 8, prefetch=name) for name in ("markov", "oracle", "off"))]


def played(cell: Cell) -> dict[str, object]:
    result = simulate_events(
        TIMED.trace, TIMED.requests, cell.capacity, policy(cell.policy), COSTS, 1000, cell.prefetch,
        EventOptions(ahead=2),
    )  # fmt: skip
    return {"prefetch": cell.prefetch, **result.as_json()}


def expected(cell: Cell, order: str) -> dict[str, object]:
    how = {"scope": "shared", "pin": cell.pin, "seed": 0}
    done = replay(stream(TRACE, order), TRACE.offsets, cell.capacity, policy(cell.policy), **how)
    return {
        "policy": cell.policy, "order": order, "scope": "shared", "pin": cell.pin,
        "capacity": cell.capacity, "requests": done.requests, "misses": done.misses,
        "miss_ratio": done.misses / done.requests,
    }  # fmt: skip


@pytest.mark.parametrize("order", ["natural", "rounds", "runtime"])
def test_rows_are_those_of_single_replays_in_the_order_asked(order: str):
    calls: list[None] = []
    rows = sweep(Study.of(TRACE, order), CELLS, workers=4, done=lambda: calls.append(None))
    assert rows == [expected(cell, order) for cell in CELLS]
    assert len(calls) == len(CELLS)


def test_cells_with_prefetching_beside_others():
    plain, markov, oracle, off = sweep(TIMED, AHEAD, workers=2)
    assert plain == off
    for row, cell in ((markov, AHEAD[1]), (oracle, AHEAD[2])):
        assert played(cell).items() <= row.items()
    assert oracle["useful"] > 0
    assert oracle["seconds"] < plain["seconds"]


def test_a_part_of_the_trace_that_its_first_tokens_are_not_in():
    cells = [Cell("static:part=second-half", 8)]
    assert sweep(Study.of(TRACE, "natural"), cells)[0]["misses"] > 0


@pytest.mark.timeout(300)
def test_long_cells_with_prefetching_run_in_processes(monkeypatch: pytest.MonkeyPatch):
    threads = sweep(TIMED, AHEAD)
    monkeypatch.setattr(sweeping, "LONG", 1)
    local_cells: list[Cell] = []
    run = Study.run
    monkeypatch.setattr(
        Study, "run", lambda study, cell: local_cells.append(cell) or run(study, cell)
    )
    monkeypatch.setattr(Study, "warm", lambda study, cell: None)
    calls: list[None] = []
    assert sweep(TIMED, AHEAD, workers=2, done=lambda: calls.append(None)) == threads
    assert {cell.prefetch for cell in local_cells} == {"off"}
    assert len(calls) == len(AHEAD)


def test_prefetching_that_cannot_be():
    with pytest.raises(UsageError, match="does not work with prefetching"):
        sweep(TIMED, [Cell("lru", 8, "none", "oracle")])
    with pytest.raises(UsageError, match="policy opt must know all expert requests beforehand"):
        sweep(TIMED, [Cell("opt", 8, prefetch="oracle")])


def test_an_error_in_a_cell_ends_the_sweep():
    with pytest.raises(UsageError, match="it must be from 1 to 16"):
        sweep(Study.of(TRACE, "natural"), [*CELLS, Cell("lru", 17)], workers=2)


@pytest.mark.timeout(300)
def test_a_local_ray_gives_the_same():
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    calls: list[None] = []
    rows = sweep_on_ray(Study.of(TRACE, "natural"), CELLS[:3], "local", lambda: calls.append(None))
    assert rows == [expected(cell, "natural") for cell in CELLS[:3]]
    assert len(calls) == 3
    assert sweep_on_ray(TIMED, AHEAD[:2], "local") == sweep(TIMED, AHEAD[:2])


def test_capacities_are_slots_or_shares_rounded_down():
    assert capacities("64,25%, 0.5%,12.5%,100%,1", 1000) == [64, 250, 5, 125, 1000, 1]
    assert capacities("33.3%", 10) == [3]
    assert capacities("29%", 100) == [29]  # where floats would round down to 28


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "from 1 to 64"),
        ("65", "from 1 to 64"),
        ("-3", "from 1 to 64"),
        ("x", "give a number of experts such as 64, or a share such as 25%"),
        ("", "give a number of experts such as 64, or a share such as 25%"),
        ("5,,6", "give a number of experts such as 64, or a share such as 25%"),
        ("1/0%", "give a number of experts such as 64, or a share such as 25%"),
        ("0%", "above 0% and at most 100%"),
        ("101%", "above 0% and at most 100%"),
        ("nan%", "give a number of experts such as 64, or a share such as 25%"),
        ("1%", "less than one"),
    ],
)
def test_impossible_capacities_are_errors(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        capacities(text, 64)


def test_names_keep_their_options():
    text = "lru,moe-infinity:matching=request,capacity=50,lfu, fifo"
    assert split_names(text) == ["lru", "moe-infinity:matching=request,capacity=50", "lfu", "fifo"]
