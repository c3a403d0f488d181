"""What of a named system is simulated on a trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from greenroom.core.cost import Costs, Link, Work
from greenroom.plan.sizing import CacheConfiguration
from greenroom.plan.systems.cells import replayable_predictor, simulate_systems
from greenroom.plan.systems.table import system, systems
from greenroom.sim.study import Study
from greenroom.trace import Prediction
from tests.sim import small

TRACE = small.trace([[-3, 1, 1]], layers=2, experts=4, top_k=1)
ROWS = Prediction(np.zeros((TRACE.tokens, 2, 2), np.uint8), 1)


@pytest.mark.parametrize(
    ("recorded", "replayed"),
    [
        ((), "noisy-oracle:1,like=next-gate,width=all"),
        (("next-gate",), "next-gate:1"),
        (("next-gate", "next-gate:1,width=all"), "next-gate:1,width=all"),
        (("next-gate:width=all",), "next-gate:1,width=all"),
    ],
)
def test_moepic_ranks_as_many_experts_as_the_trace_allows(recorded, replayed):
    trace = dataclasses.replace(TRACE, predictions=dict.fromkeys(recorded, ROWS))
    assert system("moepic").prefetch == "next-gate:1,width=all"
    name, lacking = replayable_predictor(trace, system("moepic").prefetch)
    assert name == replayed
    assert bool(lacking) == (replayed != system("moepic").prefetch)
    narrow, _ = replayable_predictor(trace, "next-gate:1")
    assert narrow == ("next-gate:1" if "next-gate" in recorded else "noisy-oracle:1,like=next-gate")


def test_each_predictor_is_replaced_by_what_is_most_like_it():
    deep = small.trace([[-3, 1, 1]], layers=6, experts=4, top_k=1)
    missing, ids = "predictions of it", np.zeros(deep.tokens, np.int32)
    for name, replayed, lacking in (
        ("pregated", "pregated", ""),
        ("eamc", "eamc", ""),
        ("next-gate:2", "noisy-oracle:2,like=next-gate", missing),
        ("learned", "noisy-oracle:4,like=learned", missing),
        ("auto", "noisy-oracle:1,like=next-gate", missing),
        ("routing-path", "markov:2", "token ids"),
    ):
        assert replayable_predictor(deep, name, 4) == (replayed, lacking)
    with_ids = dataclasses.replace(deep, token_ids=ids)
    assert replayable_predictor(with_ids, "routing-path") == ("routing-path", "")
    assert replayable_predictor(TRACE, "learned", 4)[0].startswith("noisy-oracle:2,like=learned")


COSTS = Costs((Link(1000.0, lanes=1),), Work.constant(0.25), Work.constant(2.0))


def rows_of(names: str, user_options=None):
    """Simulate systems with four slots of eight; returns results and studied configurations."""
    trace = small.trace([[1] * 40], layers=2, experts=8, top_k=1, seed=4)
    study = Study.of(trace, "runtime", costs=COSTS, expert_bytes=1000)
    studied = []

    def run_cells(sized, cells):
        studied.append((sized.config.prefetch_rule, [cell.prefetch for cell in cells]))
        return [sized.run(cell) for cell in cells]

    return simulate_systems(systems(names), user_options or {}, study, [8], run_cells), studied


def test_prefetching_by_value_replaces_that_by_rank_where_it_is_faster():
    rows, studied = rows_of("pre-gated,pre-gated+greenroom,llru,moepic")
    assert [row["system"] for row in rows] == ["pre-gated", "pre-gated+greenroom", "llru", "moepic"]
    assert studied[:3] == [
        ("top-k", ["pregated"]), ("value", ["off", "pregated"]), ("value", ["off"]),
    ]  # fmt: skip
    assert studied[3][0] == "all"
    assert rows[0]["accuracy"] == 1.0  # of the layers that are predicted, all but the first
    _, studied = rows_of("pre-gated", {"prefetch_rule": "value"})
    assert studied == [("value", ["pregated"])]


def test_promoe_and_pre_gated_differ():
    promoe, pre_gated = rows_of("promoe,pre-gated")[0]
    assert promoe["accuracy"] < pre_gated["accuracy"] == 1.0
    assert promoe["without"] == [
        "learned, which noisy-oracle:2,like=learned replaces, since the trace has no"
        " predictions of it"
    ]
    assert pre_gated["without"] == []


GPU = Costs((Link(500.0, lanes=1), Link(1000.0, lanes=1)), Work.constant(0.25), Work.constant(2.0))


def chosen_for(host: int, capacity: int = 8) -> tuple[dict, list[Study]]:
    """Simulate MoEpic with a host tier; returns its result and the configured studies."""
    trace = small.trace([[1] * 40], layers=2, experts=8, top_k=1, seed=4)
    study = Study.of(trace, "runtime", costs=GPU, expert_bytes=1000, host=host)
    studied = []

    def run_cells(sized, cells):
        studied.append(sized)
        return [sized.run(cell) for cell in cells]

    return simulate_systems(systems("moepic"), {}, study, [capacity], run_cells)[0], studied


def test_moepic_splits_experts_with_a_host_tier(monkeypatch: pytest.MonkeyPatch):
    """Where host memory holds all experts they are loaded from there, as in the paper."""
    latencies = []

    def chosen(activity, capacity, latency):
        latencies.append(latency.load)
        return CacheConfiguration((4.0, 4.0), (0.5, 0.75))

    monkeypatch.setattr("greenroom.plan.systems.cells.CacheConfiguration.of", chosen)
    row, (sized,) = chosen_for(16)
    assert (sized.split, sized.host) == ((0.5, 0.75), 16)
    assert row["split"] == [0.5, 0.75]
    assert row["bottoms"] > 0
    assert not any("split" in what for what in row["without"])
    some, (sized,) = chosen_for(4)
    assert sized.split is not None
    assert some["bytes_moved"] > row["bytes_moved"]
    assert latencies == [1.0, 2.0]  # over the last link, over the slowest
    few, (sized,) = chosen_for(1)
    assert sized.split is None
    assert "Algorithm 1's splits, which need host memory for 2 experts" in few["without"]
