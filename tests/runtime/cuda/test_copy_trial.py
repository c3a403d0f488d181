"""The trial of two ways to copy experts."""

from __future__ import annotations

import logging

import pytest

from greenroom.runtime.cuda.copy_trial import TRIES, WARM_UP, CopyTrial


def run(seconds: dict[bool, float], first: float = 1.0) -> tuple[CopyTrial, list[bool]]:
    """Run a trial whose steps take so long, the first ones of each way longer by `first`."""
    trial, ways = CopyTrial(), list[bool]()
    for step in range(2 * (WARM_UP + TRIES)):
        ways.append(way := trial.next_by_kernel())
        trial.add(way, 10**9, seconds[way] + first * (step < 2 * WARM_UP) * way)
    return trial, ways


@pytest.mark.parametrize("kernel", [True, False])
def test_the_faster_way_is_kept_whatever_the_first_steps_took(kernel, caplog):
    with caplog.at_level(logging.INFO):
        trial, ways = run({kernel: 0.04, not kernel: 0.05}, first=9.0)
    assert ways == [True, False] * (WARM_UP + TRIES)
    assert [trial.next_by_kernel() for _ in range(3)] == [kernel] * 3
    (said,) = caplog.messages
    rates = ("25.0", "20.0") if kernel else ("20.0", "25.0")
    what = "a kernel" if kernel else "copies"
    assert said == (
        f"--device cuda: experts in host memory are copied by {what}"
        f" ({rates[0]} GB/s by a kernel, {rates[1]} GB/s by copies)"
    )
    trial.add(not kernel, 10**15, 0.0)  # of a step that was launched before
    assert trial.next_by_kernel() == kernel


def test_steps_that_only_one_way_can_copy_end_no_trial():
    trial = CopyTrial()
    for _ in range(99):
        trial.next_by_kernel()
        trial.add(False, 1, 0.0)
    assert trial.next_by_kernel() in (True, False)
    assert trial._kernel_is_best is None
