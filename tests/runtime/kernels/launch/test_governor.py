"""How many threads enter parallel regions: decisions by readings that are made up."""

from __future__ import annotations

import threading

import pytest

from greenroom.runtime.kernels.launch.governor import LONGEST, Governor


def run(governor: Governor, start: float, end: float, share: float, full: int = 2) -> list[int]:
    """Run regions of 5 ms, whose threads wait for a share of that; return their threads.

    A region of one thread is not measured, as it need not wait for others.
    """
    counts = []
    for number in range(round((end - start) / 0.005)):
        now = start + 0.005 * number
        counts.append(threads := governor.threads(full, now))
        if threads > 1 and governor.due(now):
            seconds = 0.005 if governor.restarts(now) else 0.01  # every other region is measured
            governor.record(threads, share * seconds, now, now + 0.005)
    return counts


def test_all_threads_enter_while_they_wait_little():
    governor = Governor()
    assert set(run(governor, 0, 5, share=0.15)) == {2}


def test_one_thread_fewer_enters_after_20_ms_of_waiting():
    governor = Governor()
    assert governor.threads(2, 1.0) == 2
    assert governor.due(1.0)
    assert governor.restarts(1.0)
    governor.record(2, 0.018, 1.0, 1.04)
    assert governor.threads(2, 1.041) == 2
    assert not governor.due(1.049)
    assert governor.due(1.051)
    assert not governor.restarts(1.051)
    governor.record(2, 0.004, 1.051, 1.06)  # 22 ms in a window of 100 ms
    assert governor.threads(2, 1.061) == 1
    assert governor.threads(2, 1.159) == 1


def test_waiting_of_an_earlier_window_does_not_count():
    governor = Governor()
    for start in (1.0, 2.0, 3.0):
        governor.record(2, 0.018, start, start + 0.1)
        assert governor.threads(2, start + 0.11) == 2


def test_the_full_number_is_tried_after_100_ms_and_kept_where_nobody_waits():
    governor = Governor()
    counts = run(governor, 0, 0.15, share=0.9)
    first = counts.index(1)
    assert 4 <= first <= 8  # 20 ms at 0.9
    counts += run(governor, 0.15, 2, share=0)
    assert counts[first : first + 20] == [1] * 20
    assert set(counts[first + 22 :]) == {2}


def test_trials_that_fail_become_rarer_and_a_later_loss_starts_anew():
    governor = Governor()
    counts = run(governor, 0, 6, share=0.9)
    pauses = [len(part) * 0.005 for part in "".join(map(str, counts)).split("2") if part]
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.011)
    assert pauses[4:-1] == pytest.approx([1.0] * len(pauses[4:-1]), abs=0.011)
    assert run(governor, 6, 6 + LONGEST + 2, share=0)[-1] == 2
    counts = run(governor, 10, 10.5, share=0.9)
    pauses = [len(part) * 0.005 for part in "".join(map(str, counts)).split("2") if part]
    assert pauses[0] == pytest.approx(0.1, abs=0.011)


@pytest.mark.parametrize(
    ("waited", "expected"),
    [(0.03, 7), (0.1, 7), (0.18, 6), (0.3, 5), (2.5, 1)],  # seconds, in 0.1 s
)
def test_as_many_threads_are_left_out_as_cores_are_lost(waited, expected):
    governor = Governor()
    governor.record(8, waited, 1.0, 1.1)
    assert governor.threads(8, 1.11) == expected


def test_more_threads_are_left_out_if_the_others_still_wait():
    governor = Governor()
    governor.record(8, 0.1, 1.0, 1.1)
    assert governor.threads(8, 1.11) == 7
    assert governor.restarts(1.11)  # another number of threads: earlier readings do not count
    governor.record(7, 0.1, 1.11, 1.18)
    assert governor.threads(8, 1.19) == 6


def test_a_smaller_full_number_is_never_exceeded():
    governor = Governor()
    governor.record(8, 0.1, 1.0, 1.1)
    assert governor.threads(4, 1.11) == 4
    assert governor.threads(8, 1.12) == 7


def test_each_calling_thread_has_decisions_of_its_own():
    governor, found = Governor(), []
    governor.record(2, 0.03, 1.0, 1.02)
    other = threading.Thread(target=lambda: found.append(governor.threads(2, 1.03)))
    other.start()
    other.join()
    assert found == [2]
    assert governor.threads(2, 1.03) == 1
