"""A thread that runs an expert predictor beside the thread that computes the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

Job = Callable[[], None]
NAME = "greenroom-predict"


class PredictionWorker:
    """A thread that runs queued jobs of an expert predictor, in their order.

    Operations of torch use no other thread, so that the worker takes one core at most. `on_error`
    gets the exceptions of jobs; the next job follows.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing, self._closed = threading.Lock(), False
        started = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(started,), name=NAME, daemon=True)
        width = torch.get_num_threads()
        self._thread.start()
        started.wait()
        torch.set_num_threads(width)  # torch gives threads that come later the last number set

    @property
    def waiting(self) -> int:
        """Return the number of jobs in the queue, without the one under way."""
        return self._jobs.qsize()

    def put(self, job: Job) -> None:
        """Queue a job; never wait. After `close` the job is not run."""
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until the jobs that are queued now have been run.

        The caller must not hold the driver's lock, for which jobs may wait. In the thread itself
        this does nothing.
        """
        if self._thread is threading.current_thread():
            return
        done = threading.Event()
        with self._closing:
            if not self._closed:
                self._jobs.put(done.set)
        if self._closed:
            self._thread.join()
        else:
            done.wait()

    def _work(self, started: threading.Event) -> None:
        torch.get_num_threads()  # the first call in a thread sets the process's number
        torch.set_num_threads(1)
        started.set()
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException as error:
                    self._on_error(error)
                del job  # an idle thread must not keep a layer's inputs alive

    def close(self) -> None:
        """End the thread, after the jobs in its queue."""
        with self._closing:
            self._closed = True
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
