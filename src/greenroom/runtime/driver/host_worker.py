"""The host's processor beside a device: a thread that computes one group at a time."""

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
    """Jobs are done in turn, with as many threads as whoever made this has; `meter` counts what
    they take."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._jobs: Queue[tuple[Job, Done, bool] | None] = Queue()
        self._width = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="greenroom-host", daemon=True)
        self._thread.start()

    def start(self, job: Job, done: Done) -> None:
        """Do a job when those before it are done, then call `done` with what it raised, or None."""
        self._jobs.put((job, done, torch.is_inference_mode_enabled()))

    def wait(self) -> None:
        """Until every job is done."""
        self._jobs.join()

    def _work(self) -> None:
        torch.set_num_threads(self._width)  # of this thread
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
            del done, error  # nothing of a step is kept while there is nothing to do
            self._jobs.task_done()

    def close(self) -> None:
        """End the thread, after what it is doing now."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
