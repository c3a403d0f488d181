"""Steps of one token that a device has computed before the scheduler serves them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenroom.core.events import Event, HostComputed, Routed
from greenroom.core.scheduler.resident_steps import Loads, Misses
from greenroom.errors import Interrupted, StoreError
from greenroom.runtime.driver.device_steps import DeferredSteps, DeviceSteps
from greenroom.runtime.kernels.report import TokenReport


@pytest.mark.parametrize("together", [0, 1, 2])
def test_observers_hear_of_steps_before_one_that_fails(together: int) -> None:
    """They were counted; the failed one and those behind it were not."""
    served, noted = list[int](), list[int]()

    class Step:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def serve(self) -> None:
            if self.layer == 2:
                raise StoreError("Input/output error")
            served.append(self.layer)

        def note(self) -> None:
            noted.append(self.layer)

    deferred = DeferredSteps(lambda steps: together)
    for layer in range(4):
        deferred.add(Step(layer))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="Input/output error"):
        deferred.settle()
    assert served == [0, 1][together:]
    assert noted == [0, 1]
    deferred.settle()  # there are none any more
    assert noted == [0, 1]


def test_an_interrupted_pass_ends_without_another_error():
    """Torch would print a warning in place of an error at a pass's end, and end no pass."""
    error: Exception = Interrupted("nobody waits for its result")

    def serve(steps: Any) -> int:
        raise error

    deferred, step = DeferredSteps(serve), SimpleNamespace(layer=0)
    deferred.add(step)  # type: ignore[arg-type]
    deferred.end_pass()
    assert not deferred._steps
    error = StoreError("Input/output error")
    deferred.add(step)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        deferred.end_pass()


def loads_of(*pieces: int) -> Loads:
    """Experts that move to slots, which nobody reads here."""
    return Loads(np.array([pieces, pieces, pieces], np.int64))


class Rig:
    """A driver whose scheduler serves one step as `misses` says; layer 1 begins at expert 4."""

    copies = None

    def __init__(self, misses: Misses | None, missing: Sequence[int]) -> None:
        self.did, self.undone, self.handled = list[Any](), list[Any](), list[Event]()
        self.reached = list[tuple[int, int]]()
        self.layer, self.device_only, self.launches = 1, False, self
        numbers = np.array([[0] * 3, [0, 2, 3], [*missing, *[0] * 3][:3]])
        self.report = TokenReport(np.array([4, 6, 7]), len(missing), numbers)
        residents = SimpleNamespace(
            load=lambda event, now: self.served(event, misses),
            undo=lambda misses, event: self.undone.append(misses),
        )
        self.driver: Any = SimpleNamespace(
            timeline=None,
            step_lock=threading.Lock(),
            begin_exclusive=lambda interruptible: None,
            scheduler=SimpleNamespace(resident_steps=residents),
            lock=threading.RLock(),
            pieces=SimpleNamespace(offsets=[0, 4, 8]),
            passes=SimpleNamespace(
                number=0, layer=0, request=0, prefill=False, note_layers=lambda *_: None
            ),
            resident=SimpleNamespace(count=lambda pieces: None),
            miss_counts=np.zeros(2, np.int64),
            meter=SimpleNamespace(host_s=0.0),
            predictions=SimpleNamespace(
                predicts=False,
                reached=lambda *at: self.reached.append(at),
                observe=lambda *_: self.did.append("observe"),
            ),
        )
        loads: Any = SimpleNamespace(launch=self.launch)
        actions: Any = SimpleNamespace(mark_broken=lambda error: self.did.append("broken"))
        self.steps = DeviceSteps(self.driver, actions, loads, self.handled.append)

    def served(self, event: Routed, misses: Misses | None) -> Misses | None:
        assert event.experts.tolist() == [4, 6, 7]
        assert event.device_only == self.device_only
        assert self.reached == [(0, 1)]  # a prediction for the layer is overtaken from here on
        return misses

    def launch(
        self, layer: int, loads: Loads, launches: Any, then: Callable[[], None] | None
    ) -> None:
        self.did.append(loads.pieces)
        assert launches is self.launches
        self.did.append("compute")
        if then is not None:
            then()

    def send_inputs(self) -> None:
        self.did.append("inputs")

    def compute_on_host(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        self.did.append((experts, slots))

    def observe(self, inputs: bool) -> Any: ...
    def serve(self) -> None: ...
    def note(self) -> None: ...


@pytest.mark.parametrize(
    ("loaded", "on_host", "missing", "expected"),
    [
        ([], [6, 7], [2, 3], ["inputs", ([2, 3], [8, 9])]),
        ([6], [7], [2, 3], ["inputs", [6], "compute", ([3], [8])]),
        # The second one has come to a slot since the look-up: nobody has computed it.
        ([], [6], [2, 3], ["inputs", [], "compute", ([2], [8])]),
        ([], [], [2, 3], [[], "compute"]),
        # The first one has lost its slot since the look-up, which has found it.
        ([6], [7], [3], ["inputs", [6], "compute", ([3], [8])]),
    ],
)
def test_a_device_computes_what_is_missing_and_not_the_host_s(loaded, on_host, missing, expected):
    """Inputs go to the host before experts come to the device."""
    loads = loads_of(*loaded)
    rig = Rig(Misses(loads, on_host, [8, 9][: len(on_host)]), missing)
    assert rig.steps.load(rig)
    assert rig.did == [*expected, "observe"]
    assert rig.driver.miss_counts.tolist() == [0, len(loaded) + len(on_host)]
    assert [(e.layer, e.experts, e.seconds > 0) for e in rig.handled] == (  # type: ignore[union-attr]
        [(1, on_host, True)] if on_host else []
    )
    assert (rig.driver.meter.host_s > 0) == bool(on_host)


@pytest.mark.parametrize("on_host", [[], [7]])
def test_the_next_launches_follow_at_once_unless_the_host_computes(on_host: list[int]) -> None:
    """Its part of the sum must come before them."""
    rig = Rig(Misses(loads_of(6), on_host, [9][: len(on_host)]), [2, 3])
    assert rig.steps.load(rig, lambda: rig.did.append("next"))
    after = ["inputs", [6], "compute", ([3], [9])] if on_host else [[6], "compute", "next"]
    assert rig.did == [*after, "observe"]


def test_experts_of_later_layers_are_predicted_before_the_host_computes() -> None:
    rig = Rig(Misses(loads_of(), [6], [8]), [2])
    rig.driver.predictions.predicts = True
    assert rig.steps.load(rig)
    assert rig.did == ["inputs", "observe", ([2], [8])]


def test_an_error_on_the_host_ends_its_part_of_the_step() -> None:
    rig = Rig(Misses(loads_of(), [6], [8]), [2])
    rig.compute_on_host = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        rig.steps.load(rig)
    assert rig.handled == [HostComputed(1, [6], 0.0)]
    assert rig.undone == []


def test_an_error_before_the_host_computes_takes_the_step_back() -> None:
    misses = Misses(loads_of(), [6], [8])
    rig = Rig(misses, [2])
    rig.send_inputs = lambda: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        rig.steps.load(rig)
    assert rig.handled == []
    assert len(rig.undone) == 1
    assert rig.undone[0] is misses


def test_a_step_that_needs_events_is_not_begun() -> None:
    rig = Rig(None, [2])
    rig.device_only = True
    assert not rig.steps.load(rig)
    assert rig.did == []


def test_options_hear_of_the_bytes_that_experts_take_in_slots() -> None:
    """As of the chunks that lanes bring: on disk they take twice as many in float32."""
    rig, heard = Rig(None, []), list[Any]()
    driver, link = rig.driver, SimpleNamespace(nbytes=0, busy_s=0.0)
    driver.meter = SimpleNamespace(links=[link], add_stall=lambda *_: None)
    driver.pieces.nbytes = [50] * 4 + [100] * 4
    driver.scheduler.option_calls = SimpleNamespace(copied=lambda *of: heard.append(of))
    loads: Any = rig.steps._loads
    loads.take_ended = lambda: iter([(0, 1, 100, 0.25), (1, 3, 600, 0.5)])
    rig.steps.count_loads()
    assert heard == [(50, 0.25), (300, 0.5)]
    assert (link.nbytes, link.busy_s) == (700, 0.75)
