"""A thread that computes expert groups on the host processor, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue

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
        self._jobs: Queue[tuple[Job, Done, bool] | None] = Queue()
        self._width = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="greenroom-host", daemon=True)
        self._thread.start()

    def start(self, job: Job, done: Done) -> None:
        """Queue a job for the thread that computes on the host processor.

        After the job, that thread calls `done` with the exception that the job raised, or None.
        """
        self._jobs.put((job, done, torch.is_inference_mode_enabled()))

    def wait(self) -> None:
        """Wait until the host processor's thread has done every queued job."""
        self._jobs.join()

    def _work(self) -> None:
        torch.set_num_threads(self._width)  # a setting of each thread
        while (entry := self._jobs.get()) is not None:
            job, done, inference = entry
            begin = time.perf_counter()
            error: BaseException | None = None
            try:
                with torch.inference_mode(inference), torch.no_grad():
                    job()
            except BaseException as raised:
                error = raised
            self._meter.host_s += time.perf_counter() - begin
            del job, entry
            done(error)
            del done, error  # an idle thread must not keep a step's tensors alive
            self._jobs.task_done()

    def close(self) -> None:
        """End the host processor's thread, after the jobs in its queue."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
