"""Fair turns."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from greenroom.runtime.driver.fair_lock import FairLock


def waiting(turns: FairLock, count: int) -> None:
    """Until so many threads wait for their turn."""
    until = time.monotonic() + 10
    while len(turns._waiting) != count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_in_the_order_of_asking():
    turns, order, threads = FairLock(), [], []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    with turns:
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            waiting(turns, name + 1)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_one_who_takes_it_again_and_again_lets_others_in():
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


def test_given_back_after_an_error():
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass


def test_interrupted_while_waiting_nobody_waits_for_ever():
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
        waiting(turns, 1)
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
