"""Predictions by hand: what fits, who computes misses, and times without and with misses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.core.cost import Costs, Link, Work
from greenroom.core.home_devices import SPREAD
from greenroom.errors import BudgetError
from greenroom.plan.cards.predict import Prediction, predict
from greenroom.plan.estimate import Estimator
from greenroom.plan.settings import AUTO, DEFAULT, OFF
from greenroom.plan.workload import synthetic_workload
from tests.options import needs_option
from tests.plan.models import MIB, MODEL

# An expert takes 1 ms on the card, 4 ms to move, 2 ms on the host, 40 ms from disk.
COSTS = Costs(
    (Link(MIB / 40e-3, 0.0, 4), Link(MIB / 4e-3, 0.0, 2)),
    Work.constant(1e-3), Work.constant(2e-3), host=Work.constant(2e-3),
)  # fmt: skip
EVERY = MODEL.experts * MIB
WORKLOAD = synthetic_workload(MODEL)


def prediction(slots: int, host: int, costs: Costs = COSTS, cards: int = 1) -> Prediction:
    memory = MODEL.memory(slots)
    return predict(MODEL, costs, WORKLOAD, memory, host * MIB, bracket=False, cards=cards)


def test_a_model_that_fits_has_no_misses() -> None:
    """Four layers of 2 ms, each with two experts of 1 ms; nothing else, once caches are full."""
    predicted = prediction(MODEL.experts, 0, replace(COSTS, handling=1.0))
    assert predicted.fits
    assert predicted.shared is None
    assert predicted.moved.tpot == pytest.approx(4 * (2e-3 + 2 * 1e-3))


def test_tokens_that_are_graphs_take_the_host_less_time() -> None:
    """A layer takes 0.5 ms in place of 2 ms, but only for one token, and if nothing is missing."""
    graph = replace(COSTS, resident=COSTS.dense.with_single(0.5e-3))
    predicted = prediction(MODEL.experts, 0, graph)
    assert predicted.graph
    assert predicted.moved.tpot == pytest.approx(4 * (0.5e-3 + 2 * 1e-3))
    assert predicted.moved.ttft == prediction(MODEL.experts, 0).moved.ttft
    some = prediction(48, MODEL.experts, graph)
    assert not some.graph
    assert some.moved.tpot == prediction(48, MODEL.experts).moved.tpot
    assert not prediction(MODEL.experts, 0).graph
    two = prediction(MODEL.experts // 2, 0, graph, cards=2)
    assert two.fits
    assert not two.graph  # of one GPU only


def test_tokens_in_pieces_take_the_host_less_time() -> None:
    """A layer takes 0.5 ms in place of 2 ms, for one token."""
    pieces = replace(COSTS, pieces=COSTS.dense.with_single(0.5e-3))
    plain, some = (prediction(48, MODEL.experts, costs) for costs in (COSTS, pieces))
    assert (plain.pieces, some.pieces, some.graph) == (False, True, False)
    assert some.moved.tpot == pytest.approx(plain.moved.tpot - 4 * 1.5e-3)
    assert some.moved.ttft == plain.moved.ttft
    if some.shared is not None:  # else co-compute was removed
        assert plain.shared is not None
        assert some.shared.tpot == pytest.approx(plain.shared.tpot - 4 * 1.5e-3, rel=1e-2)
    everything = prediction(MODEL.experts, 0, pieces)
    assert not everything.pieces
    assert everything.moved.tpot == prediction(MODEL.experts, 0).moved.tpot
    assert not prediction(24, MODEL.experts, pieces, cards=2).pieces  # of one GPU only


@pytest.mark.parametrize(("layer", "prefetches"), [(1.999e-3, True), (0.1e-3, False)])
def test_prefetching_must_be_faster_than_pieces(layer: float, prefetches: bool) -> None:
    """A guarded run either predicts, or each layer takes `layer` in place of 2 ms."""
    costs = replace(COSTS, links=(Link(MIB / 1e-3, 0.0, 2),), host=None)
    pieces = replace(costs, pieces=costs.dense.with_single(layer))
    estimator, plain = Estimator(MODEL, pieces, WORKLOAD), Estimator(MODEL, costs, WORKLOAD)
    guarded, off = (
        estimator.of(replace(DEFAULT, prefetch=prefetch), 32, bracket=False).tpot
        for prefetch in (AUTO, OFF)
    )
    ahead = plain.of(replace(DEFAULT, prefetch=AUTO), 32, bracket=False).tpot
    assert guarded == pytest.approx(ahead if prefetches else off)
    assert (guarded < off) == prefetches


def test_several_cards_hold_more_and_have_a_placement() -> None:
    """Four layers of 16 experts, of which a card holds 24: three have at most 72 slots."""
    slow, fast = (replace(COSTS, hop=hop) for hop in (9e-3, 0.0))
    one, two, three = (prediction(24, MODEL.experts, slow, cards=n) for n in (1, 2, 3))
    assert (one.capacity, two.capacity) == (24, 48)
    assert one.placement is SPREAD
    assert (two.placement.name, two.fits) == ("layers", False)
    # Three cards have 1, 2 and 1 layers: a card with two holds 24 of its 32 experts.
    assert (three.capacity, three.fits) == (48, False)
    assert prediction(24, MODEL.experts, fast, cards=3).fits
    resident = prediction(32, 0, fast, cards=2)
    assert (resident.placement.name, resident.fits) == ("experts", True)
    alone = prediction(64, 0, fast).moved.tpot
    assert resident.moved.tpot < alone  # two experts on two cards take less than 2 ms
    layers = prediction(32, 0, slow, cards=2)
    assert layers.moved.tpot == pytest.approx(4 * (2e-3 + 2 * 1e-3) + 2 * 9e-3)


def test_experts_in_main_memory_are_never_read_from_disk() -> None:
    predicted = prediction(16, MODEL.experts)
    assert not predicted.fits
    assert (predicted.capacity, predicted.host) == (16, MODEL.experts)
    slow = replace(COSTS, links=(Link(1.0), COSTS.links[1]))
    assert prediction(16, MODEL.experts, slow).moved.tpot == predicted.moved.tpot
    misses = predicted.moved.miss_ratio * MODEL.top_k * MODEL.layers
    assert 0.016 < predicted.moved.tpot < 0.016 + 1.3 * misses * 4e-3


def test_fewer_experts_in_memory_are_slower() -> None:
    times = [prediction(*sizes).moved.tpot for sizes in ((48, 64), (16, 64), (16, 32), (16, 0))]
    assert times == sorted(times)
    assert len(set(times)) == 4


@needs_option("co_compute")
def test_the_host_takes_misses_where_that_is_sooner() -> None:
    predicted = prediction(16, MODEL.experts)
    assert predicted.shared is not None
    assert predicted.shared.setting.co_compute == "auto"
    assert predicted.shared.tpot < 0.9 * predicted.moved.tpot
    assert prediction(16, 0).shared is None


@needs_option("co_compute")
def test_the_host_s_share_takes_time_of_its_own() -> None:
    """Layers that miss take 1 ms more where misses are divided; what is moved takes no longer."""
    costs = replace(COSTS, shared_miss=1e-3)
    plain, shared = (prediction(16, MODEL.experts, each) for each in (COSTS, costs))
    assert shared.moved.tpot == plain.moved.tpot
    assert plain.shared is not None
    assert shared.shared is not None
    assert 1e-3 < shared.shared.tpot - plain.shared.tpot < 4.01e-3


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(BudgetError, match="small needs"):
        predict(MODEL, COSTS, WORKLOAD, MODEL.least_memory - 1, EVERY)
