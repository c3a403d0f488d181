"""Approximated misses, over traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import NO_OPTIONS
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.gates import tail_weights
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.sim.approximation import CopySizes, tail_weights_of
from greenroom.sim.event_driven import EventOptions, passes, simulate_events
from greenroom.sim.study import Cell, Study
from greenroom.trace import Trace, stream
from tests.plan.models import trace
from tests.sim.small import simulate
from tests.thresholds import config_of

precision = pytest.importorskip("greenroom.core.options.rules.precision").precision

COSTS = Costs((Link(1e6, 0.0, 1),), Work.constant(1e-3), Work.constant(1e-3))
BYTES = 4000


def weighed() -> Trace:
    own_trace = trace()
    weights = np.random.default_rng(1).random(own_trace.experts.shape)
    return replace(own_trace, weights=weights.astype(np.float16))


def run(of: Trace, at: Approximation | None, capacity: int = 16, **options):
    """With copies of a quarter of an expert's bytes, where nothing else is said."""
    config = NO_OPTIONS if at is None else config_of(at)
    return simulate_events(
        of, stream(of, "runtime"), capacity, policy("lru"), COSTS, BYTES, "off",
        EventOptions(config=config, **{"low": 0.25, **options}),
    )  # fmt: skip


def test_a_step_s_tail_weights_are_those_of_its_tokens():
    of = weighed()
    ranked_weights = tail_weights_of(of, 3, 4, 1)
    chosen = of.experts[3, 1]
    assert ranked_weights.tolist() == tail_weights(of.weights[3, 1])[np.argsort(chosen)].tolist()
    for at, steps in passes(of, stream(of, "runtime"), tail_weights=True):
        for step in steps:
            assert (step.tail_weights is None) == at.prefill
            assert at.prefill or step.tail_weights.size == step.experts.size


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_and_counts_of_approximated_misses_add_up(nested, devices):
    of = weighed()
    at = Approximation(low=0.7, precision="int4", share=0.25)
    ranked_weights = run(of, at, low=None, nested=nested, devices=devices)
    sizes = CopySizes.of(at, nested)
    c, copies = ranked_weights.counts, sizes.pieces(of, BYTES, 16, 1 << 20).copies
    assert c.low > 0
    exact = c.misses - c.low - c.joined
    moved = exact * BYTES + (c.low - c.low_hits) * copies.low[0]
    moved += c.joined * (BYTES - copies.low[0])
    assert ranked_weights.times.bytes_moved == moved
    assert (c.joined > 0) == nested
    row = ranked_weights.as_json()
    assert row["inexact_share"] == c.low / c.requests
    assert row["low_hits"] == c.low_hits
    assert "low" not in run(of, None).as_json()


def test_approximating_more_misses_takes_less_time():
    of = weighed()
    times = [
        run(of, at).times.gaps.mean()
        for at in (None, Approximation(low=0.5), Approximation(low=0.5, skip=0.3))
    ]
    assert times[0] > times[1] > times[2]


def test_more_requests_are_exact_with_promotion():
    of = weighed()
    unapproximated, followed = (
        run(of, Approximation(low=0.5, promote=follow)) for follow in (False, True)
    )
    assert "promoted" not in unapproximated.as_json()
    assert followed.as_json()["promoted"] == followed.counts.promoted > 0
    assert followed.counts.low < unapproximated.counts.low
    assert followed.times.bytes_moved > unapproximated.times.bytes_moved


def test_the_event_machine_itself_counts_the_same():
    of = weighed()
    at = Approximation(skip=0.2, substitute=0.5)
    steps = [s for _, each in passes(of, stream(of, "runtime"), tail_weights=True) for s in each]
    from greenroom.core.pieces import Pieces

    pieces = Pieces.unsplit(of.offsets.tolist(), [BYTES] * of.layers)
    unapproximated = simulate(
        steps, pieces, 16, policy("lru"), costs=COSTS, options=[precision(at, pieces)]
    ).counts
    assert run(of, at).counts == unapproximated
    assert unapproximated.skipped > 0
    assert unapproximated.substituted > 0


def test_a_sweep_accepts_approximation():
    of = weighed()
    study = Study.of(
        of, "runtime", costs=COSTS, expert_bytes=BYTES, config=config_of(Approximation(low=0.5))
    )
    row = study.run(Cell("lru", 16))
    assert 0 < row["inexact_share"] < 1
    with pytest.raises(UsageError, match="pin step"):
        study.run(Cell("lru", 16, "none"))


def test_impossible_options_are_errors():
    with pytest.raises(UsageError, match="supports only whole experts and one processor"):
        run(weighed(), Approximation(low=0.5), split=0.5)
    with pytest.raises(UsageError, match="the trace has no gate weights"):
        run(trace(), Approximation(low=0.5))
