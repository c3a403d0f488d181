"""The lock that threads get in the order of their requests."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import pytest

from greenroom.runtime.driver.fair_lock import FairLock


def wait_for_waiters(turns: FairLock, count: int) -> None:
    """Wait until `count` threads wait for the lock."""
    until = time.monotonic() + 10
    while len(turns._waiting) != count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_threads_get_the_lock_in_the_order_of_their_requests():
    turns, order, threads = FairLock(), [], []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    with turns:
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            wait_for_waiters(turns, name + 1)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_a_thread_that_takes_the_lock_in_a_loop_lets_others_in():
    turns, stop, turns_taken = FairLock(), threading.Event(), [0]

    def hog() -> None:
        while not stop.is_set():
            with turns:
                turns_taken[0] += 1

    thread = threading.Thread(target=hog)
    thread.start()
    for _ in range(200):
        before = turns_taken[0]
        with turns:
            mine = turns_taken[0]
            time.sleep(0.0001)
            assert turns_taken[0] == mine
        assert mine - before < 1_000_000
    stop.set()
    thread.join()


def test_an_error_releases_the_lock():
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass


def test_an_interrupted_wait_leaves_the_lock_usable():
    turns, inside, leave, after = FairLock(), threading.Event(), threading.Event(), []

    def holder() -> None:
        with turns:
            inside.set()
            leave.wait()

    def other() -> None:
        with turns:
            after.append(True)

    first = threading.Thread(target=holder, daemon=True)
    first.start()
    inside.wait()

    class Interrupt(Exception):
        pass

    def interrupted(*_: object) -> None:
        if turns._waiting:
            raise Interrupt

    def interrupt() -> None:
        wait_for_waiters(turns, 1)
        while turns._waiting:  # a signal just before the wait begins would not end it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.01)

    before = signal.signal(signal.SIGUSR1, interrupted)
    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(Interrupt), turns:
        pass
    killer.join()
    signal.signal(signal.SIGUSR1, before)
    assert not turns._waiting
    second = threading.Thread(target=other)
    second.start()
    leave.set()
    first.join()
    second.join(10)
    assert after == [True]


def interrupt_in(function: Any, event: str) -> None:
    """Interrupt the calling thread where it next enters or leaves a function."""

    def trace(frame: Any, what: str, argument: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if what == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize(
    ("function", "event"), [(FairLock.__enter__, "return"), (FairLock.__exit__, "call")]
)
def test_a_thread_that_was_interrupted_around_its_turn_gets_the_next_one(function, event):
    turns, taken = FairLock(), list[str]()

    def take() -> None:
        with turns:
            taken.append("other")

    def interrupted() -> None:
        try:
            interrupt_in(function, event)
            with turns:
                pass
        except KeyboardInterrupt:
            taken.append("interrupted")
        other = threading.Thread(target=take, daemon=True)
        other.start()
        wait_for_waiters(turns, 1)
        with turns:
            taken.append("again")
        other.join()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(10)
    assert taken == ["interrupted", "again", "other"]


def test_a_request_that_was_interrupted_before_its_wait_is_of_nobody():
    turns, left, taken = FairLock(), threading.Lock(), list[bool]()
    left.acquire()

    def take() -> None:
        turns._waiting.append((left, threading.get_ident()))
        with turns:
            taken.append(True)

    with turns:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        until = time.monotonic() + 10
        while [each for each, _ in turns._waiting] in ([], [left]) and time.monotonic() < until:
            time.sleep(0.001)
    thread.join(10)
    assert taken == [True]
    assert not turns._waiting
