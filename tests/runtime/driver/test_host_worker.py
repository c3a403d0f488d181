"""The host processor's thread: interrupts of the thread that starts jobs and waits for them."""

from __future__ import annotations

import signal
import time

from greenroom.runtime.driver.host_worker import HostWorker
from greenroom.runtime.driver.meter import Meter
from tests.runtime.rig import in_time


def test_interrupts_leave_no_job_undone_and_no_wait_without_an_end() -> None:
    """A queue of Python's code would be left locked, or its count of jobs would be wrong."""
    worker = HostWorker(Meter.for_lanes(()))
    started, done, interrupts = 0, list[BaseException | None](), 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)
                while True:
                    started += 1  # at least as many as are done
                    worker.start(lambda: None, done.append)
                    worker.wait()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)
    assert interrupts > 10
    in_time(worker.wait)
    assert started - interrupts <= len(done) <= started
    assert done == [None] * len(done)
    in_time(worker.close)


def test_nobody_waits_for_a_thread_that_has_ended() -> None:
    worker = HostWorker(Meter.for_lanes(()))
    worker.close()
    in_time(worker.wait)
