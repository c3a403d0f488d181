"""The predictor's thread, and predictions beside the steps of a running driver."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.errors import ClosedError
from greenroom.runtime.driver.prediction_worker import PredictionWorker
from greenroom.runtime.driver.predictions import BACKLOG
from greenroom.runtime.driver.timeline import PREDICT, Timeline
from tests.runtime.rig import PATIENCE, Rig, in_time, threads


@pytest.fixture
def errors():
    return []


@pytest.fixture
def worker(errors):
    made = PredictionWorker(errors.append)
    yield made
    made.close()


def test_the_worker_runs_jobs_in_order_while_the_caller_goes_on(worker):
    ran: list[Any] = []
    for number in range(50):
        worker.put(lambda number=number: ran.append((number, threading.current_thread().name)))
    worker.drain()
    assert ran == [(number, "greenroom-predict") for number in range(50)]


def test_the_worker_computes_alone_and_others_as_before(worker):
    width, found = torch.get_num_threads(), []
    worker.put(lambda: found.extend((torch.get_num_threads(), torch.is_grad_enabled())))
    worker.drain()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [1, False, width]
    assert torch.get_num_threads() == width


def test_a_job_that_raises_ends_no_other(worker, errors):
    ran = []

    def leave() -> None:
        raise SystemExit("no more")

    worker.put(leave)
    worker.put(lambda: ran.append(1))
    in_time(worker.drain)
    assert ran == [1]
    assert [str(error) for error in errors] == ["no more"]


def test_a_job_may_drain_the_queue_it_is_in(worker, errors):
    worker.put(worker.drain)
    in_time(worker.drain)
    assert errors == []


def test_close_runs_what_is_queued_and_ends_the_thread(errors):
    before, ran = threads(), []
    worker = PredictionWorker(errors.append)
    assert len(threads()) == len(before) + 1
    for number in range(5):
        worker.put(lambda number=number: ran.append(number))
    worker.close()
    assert ran == [0, 1, 2, 3, 4]
    assert threads() == before
    worker.put(lambda: ran.append(5))
    in_time(worker.drain, worker.close)
    assert ran == [0, 1, 2, 3, 4]


class Slow:
    """A predictor that waits in `predict` until the test lets it go on.

    It names expert 3 of the layer `distance` layers after each, also of the next pass.
    """

    name, distance, costly = "slow", 1, True

    def __init__(self, distance: int = 1, free: bool = False) -> None:
        self.distance = distance
        self.seen: list[Any] = []
        self.predicted: list[int] = []
        self.arrays: list[LayerRouting] = []
        self.begun, self.may_go = threading.Event(), threading.Event()
        if free:
            self.may_go.set()

    def begin(self, at: PassStart) -> None:
        self.seen.append(f"pass of {at.tokens}")

    def observe(self, routing: LayerRouting) -> None:
        self.seen.append(routing.layer)
        self.arrays.append(routing)

    def predict(self, layer: int) -> list[LayerPrediction]:
        self.begun.set()
        assert self.may_go.wait(PATIENCE)
        self.predicted.append(layer)
        return [LayerPrediction(layer + self.distance, np.array([[3]]))]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def with_worker(rig: Any, predictor: Any, *, layers: int = 4, **kwargs: Any) -> Rig:
    """Make a rig whose predictor runs in a worker; an expert has three chunks."""
    return rig(8, layers=layers, experts=8, ahead=4, predictor=predictor, worker=True, **kwargs)


def run_pass(r: Rig, *chosen: int, tokens: int = 1, wait: threading.Event | None = None) -> None:
    """Run a decode pass whose layers use one expert each; after its beginning, `wait`."""
    r.begin(tokens=tokens)
    assert wait is None or wait.wait(PATIENCE)
    for layer, expert in enumerate(chosen):
        r.step(layer, expert)
    r.driver.end_pass()


def test_a_prediction_from_the_worker_fetches_its_expert(rig):
    r = with_worker(rig, Slow(free=True))
    r.begin()
    r.driver.predictions.drain()
    r.step(0, 0)
    r.driver.predictions.drain()
    r.settle()
    r.step(1, 3)
    counts = r.scheduler.counts
    assert counts.useful == 1
    assert r.driver.meter.overtaken == 0
    r.settle()
    r.check()


def test_a_predictor_that_hangs_delays_no_step(rig):
    """All steps of two passes end while the first prediction is still being made."""
    predictor = Slow()
    r = with_worker(rig, predictor)
    in_time(
        lambda: (
            run_pass(r, 0, 1, 2, 3, wait=predictor.begun),
            run_pass(r, 0, 1, 2, 3, tokens=2),
        )
    )
    assert predictor.predicted == []
    predictor.may_go.set()
    r.driver.predictions.drain()
    # every observation arrives; only what is still ahead is predicted: layer 0 of the third pass
    assert predictor.seen == ["pass of 1", 0, 1, 2, 3, "pass of 2", 0, 1, 2, 3]
    assert predictor.predicted == [-1, 3]
    assert r.driver.meter.overtaken == 9
    assert r.scheduler.view.forecast(0).tolist() == [3]
    assert all(r.scheduler.view.forecast(layer) is None for layer in (1, 2, 3))
    r.settle()
    r.check()


def test_what_is_still_ahead_is_delivered_with_its_distance(rig):
    """The prediction for layer 2 is made after layer 0, and delivered after layer 1."""
    predictor = Slow(distance=2)
    r = with_worker(rig, predictor)
    r.begin()
    r.step(0, 0)
    r.step(1, 1)
    predictor.may_go.set()
    r.driver.predictions.drain()
    r.settle()
    r.step(2, 3)
    assert r.driver.meter.overtaken == 1  # for layer 1, made when the pass began
    accuracy = r.scheduler.view.accuracy.by_distance()
    found = [(each["layer"], each["distance"], each["accuracy"]) for each in accuracy]
    assert found == [(2, 2, 1.0)]
    r.settle()
    r.check()


def test_a_late_prediction_does_not_replace_what_a_router_chose(rig):
    """Early preemption: the router of layer 1 has chosen, its step has not begun."""
    predictor = Slow()
    r = with_worker(rig, predictor)
    r.begin()
    r.step(0, 0)
    r.driver.predictions.announce_routing(1, np.array([5]) + r.driver.pieces.offsets[1])
    predictor.may_go.set()
    r.driver.predictions.drain()
    r.settle()
    assert r.scheduler.view.forecast(1) is None
    assert r.scheduler.counts.prefetches == 1
    r.step(1, 5)
    assert (r.scheduler.counts.useful, r.driver.meter.overtaken) == (1, 2)
    r.settle()
    r.check()


def test_a_resize_drops_what_the_worker_has_not_delivered(rig):
    predictor = Slow()
    r = with_worker(rig, predictor)
    r.begin()
    r.step(0, 0)
    in_time(lambda: r.driver.resize(6))
    predictor.may_go.set()
    r.driver.predictions.drain()
    assert r.driver.meter.overtaken == 2
    assert r.scheduler.counts.prefetches == 0
    run_pass(r, 0, 1, 2, 3)
    r.driver.predictions.drain()
    r.settle()
    r.check()


def test_the_worker_observes_copies(rig):
    """The model reuses its memory for the next layer."""
    predictor = Slow()
    r = with_worker(rig, predictor)
    r.driver.predictions.begin(PassStart(0, 0, 1, False, token_ids=(ids := np.array([7]))), 0)
    chosen, weights, inputs = np.array([[3]]), np.ones((1, 1), np.float32), np.ones((1, 4))
    routing = LayerRouting(0, chosen, weights, inputs.astype(np.float32))
    r.driver.predictions.routed(0, lambda wanted: routing)
    for array in (ids, chosen, weights, routing.inputs):
        array[:] = 0
    predictor.may_go.set()
    r.driver.predictions.drain()
    (seen,) = predictor.arrays
    assert (seen.experts.item(), seen.weights.item(), seen.inputs.sum()) == (3, 1.0, 4.0)


def test_an_error_in_the_worker_ends_prefetching_and_nothing_else(rig, caplog):
    class Broken(Slow):
        def predict(self, layer: int) -> list[LayerPrediction]:
            if layer == 1:
                raise ZeroDivisionError("no idea")
            return super().predict(layer)

    r = with_worker(rig, Broken(free=True))
    for _ in range(3):
        in_time(lambda: run_pass(r, 0, 1, 2, 3))
        r.driver.predictions.drain()
    (message,) = caplog.messages
    assert "predictor slow failed, so no expert is prefetched any more" in message
    assert "no idea" in message
    assert r.driver.predictions.foresight is None
    r.settle()
    r.check()


def test_an_error_of_the_routers_inputs_is_a_predictors_error(rig, caplog):
    r = with_worker(rig, Slow(free=True))
    r.begin()

    def observe_routing(inputs: bool) -> LayerRouting:
        raise ValueError("no input was captured")

    r.driver.predictions.routed(0, observe_routing)
    r.driver.predictions.drain()
    assert "no input was captured" in caplog.text
    assert r.driver.predictions.foresight is None


def test_the_driver_closes_while_the_predictor_is_busy(rig):
    """What is queued is observed, so that the state which is saved has it; nothing is fetched."""
    before, predictor = threads(), Slow()
    r = with_worker(rig, predictor)
    r.begin()
    r.step(0, 0)
    r.step(1, 1)
    assert predictor.begun.wait(PATIENCE)
    began = r.scheduler.counts.prefetches
    closing = threading.Thread(target=r.driver.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # it waits for the predictor
    predictor.may_go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert threads() == before
    assert predictor.seen == ["pass of 1", 0, 1]
    assert r.scheduler.counts.prefetches == began
    with pytest.raises(ClosedError):
        r.step(2, 3)
    in_time(r.driver.predictions.drain)


def test_a_worker_that_falls_behind_observes_passes_from_their_beginning(rig):
    """With two layers a pass has three jobs: 12 wait; the fifth pass finds one place."""
    predictor = Slow()
    r = with_worker(rig, predictor, layers=2)
    run_pass(r, 0, 1, wait=predictor.begun)  # its first job is under way
    for _ in range(BACKLOG + 2):
        in_time(lambda: run_pass(r, 0, 1))
    predictor.may_go.set()
    r.driver.predictions.drain()
    assert predictor.seen == ["pass of 1", 0, 1] * 4 + ["pass of 1"]
    predictor.seen.clear()
    run_pass(r, 0, 1, tokens=2)
    r.driver.predictions.drain()
    assert predictor.seen == ["pass of 2", 0, 1]


def test_the_guard_switches_the_worker_off_in_the_order_of_passes(rig):
    """The decision after the first pass holds for the second, not for what waits of the first."""

    class Never:
        on, verdict = False, "no"

        def passed(self, seconds: float, stall_s: float, tokens: int) -> None: ...

    predictor = Slow(distance=8)
    r = with_worker(rig, predictor, guard=True)
    r.driver.predictions.guard = Never()
    run_pass(r, 0, 1, 2, 3)
    r.begin()
    predictor.may_go.set()
    assert not observed_inputs(r, 0)  # nothing is copied for no prediction
    assert predictor.predicted == [-1, 0, 1, 2, 3]
    assert predictor.seen[-2:] == ["pass of 1", 0]
    assert r.driver.predictions.foresight.on is False


def test_inputs_of_a_prompt_are_copied_for_its_last_layers_alone(rig):
    for worker in (False, True):
        r = rig(8, layers=4, experts=8, ahead=4, predictor=Slow(2, free=True), worker=worker)
        r.begin(prefill=True, tokens=5)
        wanted = [observed_inputs(r, layer) for layer in range(4)]
        assert wanted == [False, False, True, True], worker


def observed_inputs(r: Rig, layer: int) -> bool:
    """Report a layer's routing; return whether the driver wants the router's inputs with it."""
    wanted = []

    def observe_routing(inputs: bool) -> LayerRouting:
        wanted.append(inputs)
        return LayerRouting(layer, np.array([[0]]))

    r.driver.predictions.routed(layer, observe_routing)
    r.driver.predictions.drain()
    return wanted == [True]


def test_a_timeline_has_a_row_for_the_predictor(rig):
    for worker in (False, True):
        r = rig(8, layers=4, experts=8, ahead=4, predictor=Slow(free=True), worker=worker)
        timeline = r.driver.predictions.timeline = Timeline()
        run_pass(r, 0, 1)
        r.driver.predictions.drain()
        names = [name for _, row, name, *_ in timeline._events if row == PREDICT]
        assert names == ["after layer -1", "after layer 0", "after layer 1"], worker


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    distance=st.integers(1, 3),
    passes=st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    ),
)
def test_the_worker_observes_what_the_computing_thread_would(rig, distance, passes):
    """Whenever the predictor is held up: the same observations, and no prediction comes late.

    A layer is (expert, whether the predictor may predict while the layer is computed).
    """
    seen = []
    for worker in (False, True):
        predictor = Slow(distance, free=True)
        r = rig(8, layers=4, experts=8, ahead=4, predictor=predictor, worker=worker)
        predictions, ahead = r.driver.predictions, []
        send = predictions._send

        def checked(event: Any, r: Rig = r, send: Any = send, ahead: Any = ahead) -> None:
            ahead.append(r.scheduler.lookahead.ahead(event.layer))  # of the layer routed last
            send(event)

        predictions._send = checked
        for layers in passes:
            r.begin()
            for layer, (expert, free) in enumerate(layers):
                (predictor.may_go.set if free or not worker else predictor.may_go.clear)()
                r.step(layer, expert)
            r.driver.end_pass()
        predictor.may_go.set()
        predictions.drain()
        seen.append(predictor.seen)
        assert max(ahead, default=0) <= distance
        assert len(ahead) + r.driver.meter.overtaken == 5 * len(passes)
        r.settle()
        r.check()
        r.driver.close()
    assert seen[0] == seen[1]
