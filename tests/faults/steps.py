"""Steps of threads that fail by an exception nobody expects.

with failing_step(3) as fault:
    ...                         # the third step raises RuntimeError
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pytest

from greenroom.hf.memory.pressure import PressureWatcher
from greenroom.runtime.driver.copier import Copier
from greenroom.runtime.driver.prediction_worker import PredictionWorker
from greenroom.server.engine.admission import Admission
from greenroom.server.engine.passes import PassRunner
from greenroom.server.engine.prompts.store import PromptStore
from greenroom.server.engine.sequence import Sequence
from tests.faults.shim import Fault, Kind

KIND = Kind("step", ())
# What the threads of Greenroom do again and again.
STEPS: tuple[tuple[type, str], ...] = (
    (Copier, "_move_chunk"),
    (PassRunner, "_run"),
    (Sequence, "answer"),
    (Admission, "prepare"),
    (PromptStore, "_load"),
    (PromptStore, "_save"),
    (PressureWatcher, "_react"),
)


@contextmanager
def failing_step(number: int) -> Iterator[Fault]:
    """Let the `number`-th step fail; 0 only counts."""
    fault, counts, lock = Fault(), Counter[str](), threading.Lock()

    def fail(name: str) -> None:
        with lock:
            counts[name] += 1
            if counts.total() != number:
                return
            fault.operation = name
        raise RuntimeError("a step fails")

    def failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            fail(name)
            return function(*args, **options)

        return call

    put = PredictionWorker.put

    def put_failing(worker: PredictionWorker, job: Callable[[], None]) -> None:
        put(worker, partial(failing("PredictionWorker.job", job)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PredictionWorker, "put", put_failing)
        for owner, name in STEPS:
            function = getattr(owner, name)
            patch.setattr(owner, name, failing(f"{owner.__name__}.{name}", function))
        yield fault
    fault.counts = dict(counts)
