"""Split experts and low-precision copies over two links, with a cache of both in host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.config.scheduler import (
    NO_OPTIONS,
    SchedulerConfig,
    option_names,
    with_options,
)
from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import policy
from greenroom.predictors import OFF
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.trace import Trace, stream
from tests.options import needs_option
from tests.sim import small

EXPERT, SLOTS, EXPERTS = 1000, 8, 16
NEVER = 1e18  # bytes a second: a link that takes no time


def traced(seed: int = 0) -> Trace:
    trace = small.trace([[-6, *[1] * 24], [-3, *[1] * 24]], seed=seed)
    weights = np.random.default_rng(seed).random(trace.experts.shape).astype(np.float16)
    return replace(trace, weights=weights)


def costs(*bandwidths: float) -> Costs:
    links = tuple(Link(each, lanes=1) for each in bandwidths)
    return Costs(links, Work.constant(1.0), Work.constant(1.0))


def run(trace: Trace, machine: Costs, prefetch: str = OFF, **options) -> EventRun:
    return simulate_events(
        trace, stream(trace, "runtime"), SLOTS, policy("lru"), machine, EXPERT, prefetch,
        EventOptions(chunk_bytes=250, **options),
    )  # fmt: skip


def low_precision() -> SchedulerConfig:
    """Int4 copies, or nothing where the option was deleted and its tests are skipped."""
    names = {"miss_precision": "int4"} if "miss_precision" in option_names() else {}
    return with_options(NO_OPTIONS, **names)


LOW = low_precision()
WAYS = [
    pytest.param({"split": 0.5}, id="halves"),
    pytest.param({"split": 0.25}, id="quarters"),
    pytest.param({"split": (0.75, 1.0), "scope": "per-layer"}, id="one-layer"),
    pytest.param({"config": LOW}, id="copies", marks=needs_option("miss_precision")),
]
ON_TWO = [
    pytest.param({"split": 0.5, "devices": 2}, id="halves-on-two"),
    pytest.param(
        {"config": LOW, "devices": 2}, id="copies-on-two", marks=needs_option("miss_precision")
    ),
]
EACH = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("way", [*WAYS, *ON_TWO])
@pytest.mark.parametrize("seed", range(3))
def test_more_host_memory_reads_less_and_changes_no_miss(way, seed):
    trace, runs = traced(seed), []
    for host in (0, 4, 8, EXPERTS):
        runs.append(run(trace, costs(500.0, 2000.0), host=host, **way))
    assert len({(r.counts.misses, r.counts.low, r.counts.hits) for r in runs}) == 1
    read = [r.times.bytes_moved for r in runs]
    assert read == sorted(read, reverse=True)
    assert read[0] > read[-1]
    seconds = [r.times.seconds for r in runs]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@EACH
def test_host_memory_that_holds_all_reads_every_piece_once(way):
    trace = traced()
    both = EXPERT * EXPERTS
    if "config" in way:
        both += round(4.5 / 16 * EXPERT) * EXPERTS
    again = run(trace, costs(500.0, 2000.0), host=EXPERTS, **way)
    assert again.times.bytes_moved <= both
    more = traced(1)
    longer = replace(trace, experts=np.concatenate([trace.experts, more.experts]),
        weights=np.concatenate([trace.weights, more.weights]),
        request_starts=np.concatenate(
            [trace.request_starts, trace.tokens + more.request_starts[1:]]),
        pass_starts=np.concatenate([trace.pass_starts, trace.tokens + more.pass_starts[1:]]),
        pass_prefill=np.concatenate([trace.pass_prefill, more.pass_prefill]),
        labels=trace.labels + more.labels)  # fmt: skip
    assert run(longer, costs(500.0, 2000.0), host=EXPERTS, **way).times.bytes_moved <= both


@EACH
def test_a_disk_that_takes_no_time_leaves_the_second_link(way):
    """With an instant disk and all experts in host memory, two links are as fast as one."""
    trace, ahead = traced(), "noisy-oracle:accuracy=0.8"
    one = run(trace, costs(800.0), **way)
    two = run(trace, costs(NEVER, 800.0), host=EXPERTS, **way)
    assert two.counts == one.counts
    assert two.times.seconds == pytest.approx(one.times.seconds, rel=1e-9)
    one = run(trace, costs(800.0), ahead, **way)  # a prefetch may begin one chunk later
    two = run(trace, costs(NEVER, 800.0), ahead, host=EXPERTS, **way)
    assert two.times.seconds == pytest.approx(one.times.seconds, rel=0.05)


def test_segments_of_different_sizes_need_a_slot_for_each_layer():
    with pytest.raises(BudgetError, match=r"host memory has room for 1 experts, but needs room"):
        run(traced(), costs(500.0, 2000.0), host=1, split=(0.5, 1.0), scope="per-layer")


@needs_option("miss_precision")
def test_nested_copies_are_refused():
    with pytest.raises(UsageError, match=r"nested copies .* and --host-memory .* exclude"):
        run(traced(), costs(500.0, 2000.0), host=4, config=LOW, nested=True)


@needs_option("co_compute")
@pytest.mark.parametrize("parts", [{"split": 0.5}, {"skip_below": 0.1}])
def test_the_host_computes_whole_and_exact_experts(parts):
    both = replace(costs(500.0, 2000.0), host=Work.constant(1.0))
    chosen = {name: value for name, value in parts.items() if name in option_names()}
    if not chosen and "split" not in parts:
        pytest.skip("this option is deleted")
    config = with_options(NO_OPTIONS, co_compute="auto", **chosen)
    with pytest.raises(UsageError, match="--co-compute"):
        run(traced(), both, host=4, config=config, split=parts.get("split"))
