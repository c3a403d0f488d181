"""Costs of a profile, and of runs of the model itself."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from greenroom.core.cost import CHUNK_BYTES, Link
from greenroom.plan.costs import RunMeasurement, calibrated_costs, machine_costs, throttled_costs
from tests.plan.models import COSTS, MACHINE, MIB, MODEL


def test_a_profile_by_hand():
    """1 MiB of dense weights a layer in 1 ms, 1 ms beyond that; an expert is handled in 0.2 ms."""
    model_costs = machine_costs(MACHINE, MODEL, readers=3)
    assert model_costs.dense.seconds(1) == pytest.approx(2e-3)
    assert model_costs.dense.seconds(16) == pytest.approx(3e-3)
    assert model_costs.expert.seconds(1) == pytest.approx(1e-3)
    assert model_costs.handling == pytest.approx(2e-4)
    assert model_costs.lanes == (3,)


def test_tokens_of_a_model_with_a_graph_take_the_time_of_a_graph():
    """A token takes 8 ms and each of four layers 1 ms in place of 50 ms: 3 ms a layer."""
    (cpu,) = MACHINE.processors
    with_graph = replace(cpu, layer=50e-3, graph_token=8e-3, graph_layer=1e-3)
    machine = replace(MACHINE, processors=(with_graph,))
    assert machine_costs(machine, MODEL).resident is None
    model = replace(MODEL, token_graph=True)
    assert machine_costs(MACHINE, model).resident is None
    costs = machine_costs(machine, model)
    assert costs.resident is not None
    for tokens, layer in ((1, 3e-3), (2, 50e-3), (64, 50e-3)):
        own = costs.dense.seconds(tokens) - 50e-3
        assert costs.resident.seconds(tokens) == pytest.approx(own + layer)


def test_tokens_of_a_model_with_a_graph_may_be_in_pieces():
    """Each layer takes 1 ms in place of 50 ms, for one token."""
    (cpu,) = MACHINE.processors
    machine = replace(MACHINE, processors=(replace(cpu, layer=50e-3, piece_layer=1e-3),))
    assert machine_costs(machine, MODEL).pieces is None
    model = replace(MODEL, token_graph=True)
    assert machine_costs(MACHINE, model).pieces is None
    costs = machine_costs(machine, model)
    assert costs.resident is None
    assert costs.pieces is not None
    for tokens, layer in ((1, 1e-3), (2, 50e-3), (64, 50e-3)):
        own = costs.dense.seconds(tokens) - 50e-3
        assert costs.pieces.seconds(tokens) == pytest.approx(own + layer)


def runs(base: float, handling: float, *fetched: float) -> list[RunMeasurement]:
    """Of a machine that takes so much, and delivers 100 MB/s."""
    return [RunMeasurement(base + handling * n + 0.5, 0.5, n, 1e8 * n, n) for n in fetched]


def test_runs_tell_base_handling_and_link():
    model_costs = calibrated_costs(COSTS, MODEL, runs(0.024, 2e-3, 1, 3, 7))
    assert model_costs.handling == pytest.approx(2e-3)
    # 24 ms in 4 layers: 2 experts of 1 ms each, and what is left for the layer
    assert model_costs.expert == COSTS.expert
    assert model_costs.dense.seconds(1) == pytest.approx(4e-3)
    assert model_costs.links == (Link(1e8, 0.0, 2),)


def test_runs_that_are_alike_keep_the_profiles_handling():
    costs = replace(COSTS, handling=1e-3)
    model_costs = calibrated_costs(costs, MODEL, runs(0.020, 1e-3, 5, 6))
    assert model_costs.handling == 1e-3
    assert model_costs.dense.seconds(1) == pytest.approx(3e-3)


def test_a_model_that_is_faster_than_its_matrices():
    """8 experts of 1 ms, but a token takes 4: a tenth is the layers', experts share the rest."""
    model_costs = calibrated_costs(COSTS, MODEL, runs(0.004, 0.0, 1, 9))
    assert model_costs.dense.seconds(1) == pytest.approx(1e-4)
    assert model_costs.expert.seconds(1) == pytest.approx(0.0036 / 8)


def test_without_runs_nothing_changes():
    assert calibrated_costs(COSTS, MODEL, []) is COSTS


def test_a_limit():
    first = Link(1e9, 1e-4, 2)
    costs = replace(COSTS, links=(first, Link(2e9)))
    model_costs = throttled_costs(costs, 1e8, 1 << 30)
    assert model_costs.links == (Link(1e8, 1e-4 + CHUNK_BYTES / 1e9, 2), Link(2e9))
    assert throttled_costs(costs, 1e8, MIB).links[0].latency == pytest.approx(1e-4 + MIB / 1e9)
    assert throttled_costs(costs, 2e9, MIB) is costs
    assert throttled_costs(costs, None, MIB) is costs


def test_what_a_predictor_takes():
    """6 ms a token more than base and handling explain, over 4 layers; it says nothing of these."""
    reactive_runs = runs(0.024, 2e-3, 1, 3, 7)
    ahead = [replace(run, predicted=True) for run in runs(0.030, 2e-3, 2, 4)]
    model_costs = calibrated_costs(COSTS, MODEL, [*reactive_runs, *ahead])
    assert model_costs.ahead == pytest.approx(1.5e-3)
    assert model_costs.handling == pytest.approx(2e-3)
    assert model_costs.dense == calibrated_costs(COSTS, MODEL, reactive_runs).dense
    assert calibrated_costs(replace(COSTS, ahead=0.5), MODEL, reactive_runs).ahead == 0.5


def test_observed_keeps():
    run = RunMeasurement(1.0, 0.5, 2.0, 3.0, 4.0)
    assert RunMeasurement.from_json(asdict(run)) == run
    ahead = replace(run, predicted=True)
    assert RunMeasurement.from_json(asdict(ahead)) == ahead
