"""The choice of a placement of experts on devices: by hand, and beside the simulator's times."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.config.scheduler import NO_OPTIONS, with_options
from greenroom.core.cost import Costs, Link, Work
from greenroom.core.home_devices import SPREAD, DevicePlacement
from greenroom.core.pieces import Pieces
from greenroom.plan.workload import synthetic_trace
from greenroom.policies import policy
from greenroom.sim.device_placement import place_experts, slots_of, step_seconds
from greenroom.sim.event_driven import EventOptions, EventRun, simulate_events
from greenroom.trace import Trace, stream
from tests.sim import small

MS, NBYTES = 1e-3, 1000
TRACE = synthetic_trace((8,) * 4, 2).head(300)


def costs_of(*, load: float = 0.0, hop: float = 0.0, handling: float = 0.0) -> Costs:
    """An expert takes 1 ms to compute and `load` on a device's link; the disk takes long."""
    link = Link(NBYTES / (load * MS) if load else float("inf"))
    return Costs(
        (Link(1.0), link), Work.constant(1 * MS), Work.constant(7.0), handling * MS, hop=hop * MS
    )  # fmt: skip


def seconds_of(placement: str, trace: Trace, capacity: int, costs: Costs) -> float:
    """The seconds of a token's experts in a layer, on two devices."""
    sizes = [NBYTES] * trace.layers
    pieces = Pieces.unsplit(trace.offsets.tolist(), sizes, devices=2, placement=placement)
    return step_seconds(pieces, trace, capacity, costs)


def place(named: str, trace: Trace, capacity: int, costs: Costs, devices: int) -> DevicePlacement:
    return place_experts(named, trace, lambda pieces: capacity, costs, NBYTES, devices)


def of(experts: list[list[int]], tokens: int = 20) -> Trace:
    """Tokens that all use the same experts of each layer, of four in each."""
    return small.of([experts] * tokens, [[1] * tokens])


@pytest.mark.parametrize(
    ("experts", "hop", "spread", "layers"),
    [
        # Homes of experts: 0 1 0 1 in layer 0, 1 0 1 0 in layer 1; layers are on 0 and 1.
        ([[0, 1], [0, 1]], 0.0, 1.0, 2.0),
        ([[0, 1], [0, 1]], 3.0, 1.0 + 3, 2.0 + 3 / 2),
        ([[0, 2], [1, 3]], 3.0, 2.0, 2.0 + 3 / 2),  # spread, all are on the first device
        ([[1, 3], [0, 2]], 3.0, 2.0 + 3, 2.0 + 3 / 2),  # all are on the second one
    ],
)
def test_resident_experts_by_hand(
    experts: list[list[int]], hop: float, spread: float, layers: float
) -> None:
    trace, costs = of(experts), costs_of(hop=hop, load=50)
    found = [seconds_of(each, trace, 8, costs) for each in ("experts", "layers")]
    assert found == pytest.approx([spread * MS, layers * MS])
    placement = place("auto", trace, 8, costs, 2)
    assert placement.name == ("layers" if layers < spread else "experts")
    assert placement.seconds == pytest.approx(tuple(sorted(2 * s for s in found)))


def test_missing_experts_by_hand() -> None:
    """Tokens use experts 0 1 and 2 3 in turn, with two slots on each device.

    Layers: two slots of each layer, and both experts are always missing; inputs reach the device
    while the second one comes. Spread: one of them is on each device, whose two slots hold the
    experts of one token in two layers; the second device has inputs after its expert has come.
    """
    trace = small.of([[[0, 1]] * 2, [[2, 3]] * 2] * 10, [[1] * 20])
    costs = costs_of(load=10, handling=1, hop=4)
    spread, layers = (seconds_of(each, trace, 4, costs) for each in ("experts", "layers"))
    assert spread == pytest.approx((11 + 4 + 1) * MS)
    assert layers == pytest.approx((2 * 11 + 1) * MS)


def test_hits_are_computed_while_a_miss_comes_by_hand() -> None:
    """Expert 0 is always there and another one is missing, in one layer with two slots."""
    trace = small.of([[[0, 1 + n % 3]] for n in range(21)], [[1] * 21], most=4)
    alone = Pieces.unsplit([0, 4], [NBYTES])
    assert step_seconds(alone, trace, 2, costs_of(load=10)) == pytest.approx((10 + 1) * MS)
    assert step_seconds(alone, trace, 2, costs_of(load=0.5)) == pytest.approx((1 + 1) * MS)


def test_a_layer_more_on_one_device_takes_slots_from_the_others() -> None:
    """Five layers of four experts on two devices with 8 slots: a device with three has too few."""
    spread, layers = (
        Pieces.unsplit(range(0, 21, 4), [NBYTES] * 5, devices=2, placement=name)
        for name in ("experts", "layers")
    )
    assert (slots_of(8, spread), slots_of(8, layers)) == (16, 13)
    assert (slots_of(12, spread), slots_of(12, layers)) == (20, 20)


def test_prompts_do_not_count() -> None:
    prompt = small.of([[[0, 1]] * 2] * 4, [[-4]])
    assert seconds_of("experts", prompt, 8, costs_of()) == 0.0


def test_what_is_named_is_taken_and_one_device_has_all() -> None:
    costs = costs_of(load=1, hop=1)
    assert place("layers", TRACE, 8, costs, 2) == DevicePlacement("layers")
    assert place("auto", TRACE, 8, costs, 1) is SPREAD
    assert place("auto", TRACE, 8, costs, 5) is SPREAD  # of four layers


def test_the_reason_has_both_times() -> None:
    assert str(SPREAD) == "layers' experts spread"
    assert str(DevicePlacement(unknown="it rains")) == "layers' experts spread, since it rains"
    assert str(DevicePlacement("layers", (0.001, 0.00123))) == (
        "whole layers on each GPU: a token's experts take about 1 ms, spread 1.23 ms"
    )
    assert str(DevicePlacement("experts", (0.5, 1.0))).endswith("500 ms, in whole layers 1e+03 ms")


def run(capacity: int, costs: Costs, placement: str, devices: int = 2) -> EventRun:
    config = with_options(NO_OPTIONS, device_placement=placement)
    options = EventOptions(devices=devices, config=config)
    steps = stream(TRACE, "runtime")
    return simulate_events(TRACE, steps, capacity, policy("lru"), costs, NBYTES, "off", options)


@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize(("load", "hop", "best"), [(4.0, 4.0, "layers"), (4.0, 0.1, "experts")])
def test_the_simulator_agrees_with_the_choice(
    capacity: int, load: float, hop: float, best: str
) -> None:
    full = costs_of(load=load, hop=hop)
    costs = Costs(full.links[1:], full.expert, Work.constant(0.0), hop=full.hop)
    both = {name: run(capacity, costs, name) for name in ("experts", "layers")}
    means = {name: float(each.times.gaps[150:].mean()) for name, each in both.items()}
    assert min(means, key=lambda name: means[name]) == best
    auto = run(capacity, costs, "auto")
    assert auto.as_json()["device_placement"] == best
    assert np.array_equal(auto.times.gaps, both[best].times.gaps)
    placement = place("auto", TRACE, capacity, costs, 2)
    assert placement.seconds == pytest.approx(tuple(sorted(means.values())), rel=0.2)


def test_one_device_has_no_placement_in_its_result() -> None:
    assert "device_placement" not in run(8, costs_of(), "auto", devices=1).as_json()
