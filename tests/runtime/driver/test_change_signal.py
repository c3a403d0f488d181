"""A change wakes every thread that waits, however soon one of them waits again."""

from __future__ import annotations

import signal as signals
import sys
import threading
import time
from typing import Any

import pytest

from greenroom.runtime.driver.change_signal import ChangeSignal


def test_a_thread_that_waits_again_takes_no_other_thread_s_signal():
    signal, done = ChangeSignal(), False
    waiting = [0]

    def wait_until_done() -> None:
        with signal.lock:
            waiting[0] += 1
            while not done:
                signal.wait()

    threads = [threading.Thread(target=wait_until_done) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2000):  # changes that end no wait
        with signal.lock:
            signal.notify_all()
    while waiting[0] < len(threads):
        pass
    with signal.lock:
        done = True
        signal.notify_all()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_waiter_that_returns_again_leaves_the_others_their_signals():
    """The first thread's second wait comes before the second thread has run."""
    signal, woken = ChangeSignal(), threading.Semaphore(0)

    def wait_once(ready: threading.Event) -> None:
        with signal.lock:
            ready.set()
            signal.wait()
        woken.release()

    events = [threading.Event() for _ in range(2)]
    threads = [threading.Thread(target=wait_once, args=(event,)) for event in events]
    for thread, event in zip(threads, events, strict=True):
        thread.start()
        assert event.wait(30)
    with signal.lock:
        signal.notify_all()
        again = threading.Event()
        third = threading.Thread(target=wait_once, args=(again,))
    third.start()
    assert all(woken.acquire(timeout=30) for _ in range(2))
    assert again.wait(30)
    with signal.lock:
        signal.notify_all()
    third.join(30)
    assert not third.is_alive()


def test_an_interrupt_behind_the_release_of_a_wait_finds_the_lock_taken_again() -> None:
    change = ChangeSignal()

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        if event == "c_return" and argument.__name__ == "release":
            sys.setprofile(None)
            raise KeyboardInterrupt

    def wait() -> None:
        with change.lock:
            sys.setprofile(interrupt)
            change.wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert change.lock.acquire(blocking=False)
    change.lock.release()


def test_an_interrupt_of_a_wait_while_another_thread_has_the_lock_is_raised() -> None:
    """And not an error of the lock, which the waiting thread has again then."""
    change, taken, interrupted = ChangeSignal(), threading.Event(), threading.Event()
    main = threading.get_ident()

    def hold() -> None:
        with change.lock:
            taken.set()
            change.notify_all()
            time.sleep(0.05)  # the waiting thread wants the lock meanwhile
            signals.pthread_kill(main, signals.SIGUSR1)
            assert interrupted.wait(30)

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def wait() -> None:
        with change.lock:
            other.start()
            change.wait()

    other, before = threading.Thread(target=hold), signals.signal(signals.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signals.signal(signals.SIGUSR1, before)
    other.join(30)
    assert taken.is_set()
    assert change.lock.acquire(blocking=False)
    change.lock.release()
