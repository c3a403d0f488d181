"""How many threads enter parallel regions: decisions by readings that are made up."""

from __future__ import annotations

import threading

import pytest

from greenroom.runtime.kernels.launch.governor import LONGEST, Governor


class Clock:
    """Regions whose threads wait for a core, and the governor that hears of it."""

    def __init__(self, full: int = 2) -> None:
        self.governor, self.full, self.now, self._waited = Governor(), full, 1000.0, 0

    def run(self, seconds: float, share: float) -> list[int]:
        """Run regions of 5 ms; return how many threads enter each.

        share: of the time, in which one of the threads waits, unless it is the only one
        """
        counts = []
        for _ in range(round(seconds / 0.005)):
            counts.append(threads := self.governor.threads(self.full, self.now))
            due = self.governor.due(self.now)
            self.now += 0.005
            if threads > 1:
                self._waited += int(share * 5e6)
                if due:
                    waited = dict.fromkeys(range(1, threads), 7)
                    self.governor.record({0: self._waited, **waited}, self.now)
        return counts


def pauses(counts: list[int]) -> list[float]:
    """Seconds between two trials of both threads."""
    return [len(part) * 0.005 for part in "".join(map(str, counts)).split("2") if part]


def test_all_threads_enter_while_they_wait_little():
    assert set(Clock().run(5, share=0.3)) == {2}


def test_one_thread_fewer_enters_after_40_ms_of_waiting():
    governor = Governor()
    assert governor.threads(2, 1.0) == 2
    assert governor.due(1.0)
    governor.record({5: 100_000_000, 6: 3}, 1.0)  # before the first reading: of no concern
    assert not governor.due(1.009)
    assert governor.due(1.011)
    governor.record({5: 138_000_000, 6: 3}, 1.04)
    assert governor.threads(2, 1.041) == 2
    governor.record({5: 139_000_000, 6: 1_000_004}, 1.05)  # 40.000001 ms in a window of 100 ms
    assert governor.threads(2, 1.051) == 1
    assert governor.threads(2, 1.149) == 1
    assert governor.threads(2, 1.151) == 2


def test_waiting_of_an_earlier_window_does_not_count():
    governor, waited = Governor(), 0
    for number in range(100):
        governor.record({5: waited}, 1 + 0.051 * number)
        waited += 18_000_000
        assert governor.threads(2, 1 + 0.051 * number) == 2


def test_waiting_between_regions_that_are_far_apart_does_not_count():
    governor = Governor()
    for number in range(10):
        governor.record({5: 10**9 * number}, 1.0 + number)
        assert governor.threads(2, 1.0 + number) == 2


def test_a_thread_without_an_earlier_reading_does_not_count():
    governor = Governor()
    governor.record({5: 0, 6: 0}, 1.0)
    governor.record({5: 1, 7: 10**9}, 1.02)
    assert governor.threads(2, 1.03) == 2


def test_the_full_number_is_tried_after_100_ms_and_stays_where_nobody_waits():
    clock = Clock()
    counts = clock.run(0.1, share=0.9)
    first = counts.index(1)
    assert 9 <= first <= 15  # 40 ms at 0.9, after the first reading; one every 10 to 15 ms
    counts += clock.run(2, share=0)
    assert counts[first : first + 20] == [1] * 20
    assert set(counts[first + 22 :]) == {2}


def test_trials_that_fail_become_rarer_and_a_later_loss_starts_anew():
    clock = Clock()
    trials = pauses(clock.run(15, share=0.9))
    assert trials[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.011)
    assert trials[5:-1] == pytest.approx([LONGEST] * len(trials[5:-1]), abs=0.011)
    assert clock.run(LONGEST + 2, share=0)[-1] == 2
    assert pauses(clock.run(0.6, share=0.9))[0] == pytest.approx(0.1, abs=0.011)


@pytest.mark.parametrize(
    ("waited_ms", "expected"),
    [(60, 7), (90, 7), (160, 6), (290, 5), (2500, 1)],  # in 0.1 s
)
def test_as_many_threads_are_left_out_as_cores_are_lost(waited_ms, expected):
    governor, zeros = Governor(), dict.fromkeys(range(7), 0)
    governor.record({8: 0, **zeros}, 1.0)
    governor.record({8: waited_ms * 1_000_000, **zeros}, 1.09)
    assert governor.threads(8, 1.11) == expected


def test_more_threads_are_left_out_if_the_others_still_wait():
    clock = Clock(full=8)
    counts = clock.run(0.35, share=0.9)
    assert sorted(set(counts), reverse=True)[:4] == [8, 7, 6, 5]
    assert counts == sorted(counts, reverse=True)


def test_a_smaller_full_number_is_never_exceeded():
    clock = Clock(full=8)
    clock.run(0.09, share=0.9)
    assert clock.governor.threads(4, clock.now) == 4
    assert clock.governor.threads(8, clock.now) == 7


def test_each_calling_thread_has_decisions_of_its_own():
    clock, counts = Clock(), []
    clock.run(0.09, share=0.9)
    other = threading.Thread(target=lambda: counts.append(clock.governor.threads(2, clock.now)))
    other.start()
    other.join()
    assert counts == [2]
    assert clock.governor.threads(2, clock.now) == 1
