"""The winner of a benchmark, and its rounds as measurements for plans."""

from __future__ import annotations

from greenroom.hf.measure.entries import Entry, winner
from greenroom.hf.measure.harness import Measurement
from tests.hf.measure.conftest import BASE


def session(tpot: float, *others: float) -> Measurement:
    gaps = (tpot,) * 8 + tuple(other for other in others for _ in range(8))
    return Measurement((0.1,), gaps, ((1, 2),), 16, 8, 800, 0.02, 0.4)


def test_plain_lru_wins_unless_another_entry_is_significantly_faster():
    plain = Entry("plain", BASE, [session(t) for t in (1.0, 1.1, 1.0)])
    sure = Entry("sure", BASE, [session(t) for t in (0.9, 1.0, 0.88)])
    lucky = Entry("lucky", BASE, [session(t) for t in (0.5, 1.2, 1.05)])
    assert winner([plain, sure], plain) is sure
    assert winner([plain, lucky], plain) is plain
    assert winner([plain], plain) is plain


def test_one_round_is_not_significant_and_pairs_of_the_same_tokens_are():
    """A round of a machine that slowed down says nothing; two rounds of many tokens may."""
    plain = Entry("plain", BASE, [session(1.0, 1.2, 0.9)])
    fast = Entry("fast", BASE, [session(0.9, 1.1, 0.8)])
    assert winner([plain, fast], plain) is plain
    plain.rounds.append(session(1.1, 1.0, 1.3))
    fast.rounds.append(session(1.0, 0.9, 1.2))
    assert winner([plain, fast], plain) is fast
    fast.rounds[1] = session(1.0, 0.9, 2.0)
    assert winner([plain, fast], plain) is plain


def test_rounds_become_measurements_for_plans():
    (run,) = Entry("plain", BASE, [session(0.5)]).observed(50)
    assert (run.seconds, run.stall, run.fetched, run.carried, run.busy) == (
        0.5, 0.0025, 2.0, 800, 0.4
    )  # fmt: skip
