"""A thread that computes expert groups on the host processor, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from greenroom.runtime.driver.meter import Meter

Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class HostWorker:
    """A thread that computes queued expert groups on the host processor, one after another.

    The thread adds the seconds of its jobs to `meter.host_s`. Its torch operations use as many
    threads as those of its creator.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # an interrupt leaves it whole
        self._has_ended = False
        self._width = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="greenroom-host", daemon=True)
        self._thread.start()

    def start(self, job: Job, done: Done) -> None:
        """Queue a job for the thread that computes on the host processor.

        After the job, that thread calls `done` with the exception that the job raised, or None.
        """
        self._jobs.put(partial(self._run, job, done, torch.is_inference_mode_enabled()))

    def wait(self) -> None:
        """Wait until the host processor's thread has done every queued job."""
        done = threading.Lock()
        done.acquire()
        self._jobs.put(done.release)
        # An interrupt within `Thread.is_alive` would leave a thread that counts as ended.
        while not done.acquire(timeout=1) and not self._has_ended:
            pass

    def _work(self) -> None:
        torch.set_num_threads(self._width)  # a setting of each thread
        while (work := self._jobs.get()) is not None:
            work()
            del work  # an idle thread must not keep a step's tensors alive
        self._has_ended = True

    def _run(self, job: Job, done: Done, inference: bool) -> None:
        begin = time.perf_counter()
        error: BaseException | None = None
        try:
            with torch.inference_mode(inference), torch.no_grad():
                job()
        except BaseException as raised:
            error = raised
        self._meter.host_s += time.perf_counter() - begin
        done(error)
        del error  # else it and this frame keep each other alive

    def close(self) -> None:
        """End the host processor's thread, after the jobs in its queue."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
