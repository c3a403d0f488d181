"""The size of the cache while memory is short: cases by hand, and what always holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.cache.pressure import (
    CALM_S,
    LEAST_RESERVE,
    LONGEST_S,
    MOST_RESERVE,
    SHORTEST_S,
    CacheSize,
    MemoryReading,
    PressureRule,
    reserve_for,
)

SLOT, RESERVE = 10, 100  # bytes
FULL = CacheSize(least=4, full=80, capacity=80, filled=80)


def reading(at: float, free: int, resident: int = 0, stalled: bool = False) -> MemoryReading:
    return MemoryReading(at, free, resident, stalled)


def rule() -> PressureRule:
    return PressureRule(RESERVE, SLOT)


def test_the_reserve_is_a_quarter_of_what_will_be_left() -> None:
    mib = 1 << 20
    assert reserve_for(1000 * mib, 600 * mib) == 100 * mib
    assert reserve_for(1000 * mib, 990 * mib) == LEAST_RESERVE
    assert reserve_for(100_000 * mib, 0) == MOST_RESERVE
    assert reserve_for(1000 * mib, 1400 * mib) == 100 * mib  # the budget is too large


@pytest.mark.parametrize(("free", "slots"), [(100, 80), (99, 69), (40, 64), (0, 60)])
def test_a_shortage_frees_twice_the_reserve_by_at_most_a_quarter(free: int, slots: int) -> None:
    """200 - 99 = 101 bytes are 11 slots, 160 bytes are 16, and 20 slots are a quarter."""
    assert rule().decide(reading(0, free), FULL) == slots


def test_processes_that_wait_for_memory_double_the_mark() -> None:
    assert rule().decide(reading(0, 150), FULL) == 80
    assert rule().decide(reading(0, 150, stalled=True), FULL) == 70
    assert rule().decide(reading(0, 200, stalled=True), FULL) == 80
    assert rule().decide(MemoryReading(0, 150, 0, at_limit=True), FULL) == 70


def test_a_shrink_while_processes_wait_ends_above_its_mark() -> None:
    """259 bytes are free after it: others may take 50 of them without a second one."""
    one = rule()
    assert one.decide(reading(0, 199, stalled=True), FULL) == 74
    after = replace(FULL, capacity=74, filled=74)
    assert one.decide(reading(1, 209, stalled=True), after) == 74


def test_a_growing_process_is_met_before_memory_is_short() -> None:
    """It takes 100 bytes in 0.1 s: 0.3 s later 150 would be free, less than nothing."""
    one = rule()
    assert one.decide(reading(0, 480), FULL) == 80
    assert one.decide(reading(0.1, 380), FULL) == 68  # 80 bytes forecast, 120 missing


def test_a_reading_soon_after_another_one_makes_no_pace_of_noise() -> None:
    """20 bytes in 2 ms are no 10,000 a second: at most 200, the pace over 0.1 s."""
    one = rule()
    assert one.decide(reading(0, 400), FULL) == 80
    assert one.decide(reading(0.002, 380), FULL) == 80
    assert one.decide(reading(0.05, 320), FULL) == 68  # 800 a second: 80 bytes are left


def test_readings_in_quick_succession_still_show_a_pace() -> None:
    """1,000 bytes a second: after 0.12 s, 350 are free and 50 forecast."""
    one = rule()
    slots = [one.decide(reading(n * 0.03, 470 - 30 * n), FULL) for n in range(5)]
    assert slots == [80, 80, 80, 80, 65]


def test_what_this_process_takes_is_no_growth_of_others() -> None:
    one = rule()
    assert one.decide(reading(0, 480, resident=0), FULL) == 80
    assert one.decide(reading(0.1, 380, resident=100), FULL) == 80


def test_unfilled_slots_are_given_up_first() -> None:
    """A slot whose memory is not in use would free nothing."""
    assert rule().decide(reading(0, 90), replace(FULL, filled=50)) == 39


def test_a_cache_with_the_fewest_slots_keeps_them() -> None:
    for capacity in (3, 4):
        size = CacheSize(least=4, full=80, capacity=capacity, filled=2)
        assert rule().decide(reading(0, 0), size) == capacity


def test_the_cache_grows_slowly_once_it_is_calm() -> None:
    one, size = rule(), replace(FULL, capacity=60, filled=60)
    assert one.decide(reading(0, 0), replace(size, capacity=80, filled=80)) == 60
    assert one.decide(reading(CALM_S - 0.1, 1000), size) == 60
    assert one.decide(reading(CALM_S, 1000), size) == 65
    size = replace(size, capacity=65)
    assert one.decide(reading(CALM_S + 0.9, 1000), size) == 65
    assert one.decide(reading(CALM_S + 1.0, 1000), size) == 70
    # 10 slots are unfilled, and the next 5 would leave 199 of the 200 bytes.
    assert one.decide(reading(CALM_S + 2.0, 349), replace(size, capacity=70)) == 70
    assert one.decide(reading(CALM_S + 3.0, 350), replace(size, capacity=70)) == 75


def test_a_growth_too_early_doubles_the_calm() -> None:
    one, size = rule(), replace(FULL, capacity=60, filled=60)
    one.decide(reading(0, 0), FULL)
    assert one.decide(reading(CALM_S, 1000), size) == 65
    assert one.decide(reading(CALM_S + 1, 50), replace(FULL, capacity=65, filled=65)) == 45
    assert one.calm_s == 2 * CALM_S
    one.decide(reading(CALM_S + 1.1, 50), replace(FULL, capacity=45, filled=45))
    assert one.calm_s == 2 * CALM_S  # of one shortage only once
    one.decide(reading(1000, 1000), size)
    assert one.calm_s == 2 * CALM_S  # the cache is not full yet
    one.decide(reading(2000, 1000), FULL)
    assert one.calm_s == CALM_S


def test_readings_are_rare_while_much_is_free() -> None:
    one = PressureRule(MOST_RESERVE, 1 << 20)
    assert one.next_reading_s(FULL) == LONGEST_S
    one.decide(reading(0, 8 * MOST_RESERVE), FULL)
    assert one.next_reading_s(FULL) == LONGEST_S
    one.decide(reading(1, 2 * MOST_RESERVE + 1, resident=6 * MOST_RESERVE), FULL)
    assert one.next_reading_s(FULL) == SHORTEST_S
    assert one.next_reading_s(replace(FULL, capacity=4)) == LONGEST_S  # nothing to give


@dataclass
class Machine:
    """A machine of so many bytes, with a cache that fills its slots and other processes."""

    total: int
    one: PressureRule
    size: CacheSize
    others: int = 0
    now: float = 0.0

    def step(self, seconds: float, stalled: bool = False, fill: int = 0) -> int:
        """Read once after so many seconds; return the change in slots."""
        self.now += seconds
        before, own = self.size.capacity, self.size.filled * SLOT
        free = self.total - self.others - own  # below 0 in the tests alone: the deficit shows
        slots = self.one.decide(reading(self.now, free, own, stalled), self.size)
        filled = min(slots, self.size.filled + fill)
        self.size = replace(self.size, capacity=slots, filled=filled)
        return slots - before


SECONDS = st.floats(0.05, 3)
EVENTS = st.lists(st.tuples(SECONDS, st.integers(0, 3000), st.booleans(), st.integers(0, 9)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    least = draw(st.integers(1, 8))
    full = draw(st.integers(least, 100))
    size = CacheSize(least, full, full, draw(st.integers(0, full)))
    total = full * SLOT + draw(st.integers(0, 2000))
    reserve = draw(st.integers(1, 300))
    return Machine(total, PressureRule(reserve, SLOT), size)


@given(machines(), EVENTS)
def test_the_cache_stays_between_its_fewest_slots_and_its_budget(
    machine: Machine, events: list[tuple[float, int, bool, int]]
) -> None:
    for seconds, others, stalled, fill in events:
        machine.others = others
        before = machine.size
        change = machine.step(seconds, stalled, fill)
        assert machine.size.least <= machine.size.capacity <= machine.size.full
        unfilled = before.capacity - before.filled
        assert -max(1, machine.size.full // 4) - unfilled <= change <= max(1, before.full // 16)


@given(machines(), EVENTS)
def test_the_cache_returns_to_its_budget_after_calm(
    machine: Machine, events: list[tuple[float, int, bool, int]]
) -> None:
    machine.total = machine.size.full * SLOT + 2 * machine.one.reserve
    for seconds, others, stalled, fill in events:
        machine.others = others
        machine.step(seconds, stalled, fill)
    machine.others = 0
    machine.step(1)  # the forecast starts anew
    for _ in range(330 + 110):
        machine.step(1, fill=3)
    assert machine.size.capacity == machine.size.full


@given(machines(), EVENTS, st.integers(0, 3000))
def test_steady_processes_cause_a_bounded_number_of_changes(
    machine: Machine, events: list[tuple[float, int, bool, int]], others: int
) -> None:
    """The cache finds its size: it shrinks, grows as far as there is room, and then stays."""
    for seconds, taken, stalled, fill in events:
        machine.others = taken
        machine.step(seconds, stalled, fill)
    machine.others = others
    changes = [machine.step(0.5, fill=20) for _ in range(1500)]
    shrinks = [number for number, change in enumerate(changes) if change < 0]
    growths = [number for number, change in enumerate(changes) if change > 0]
    assert not shrinks or not growths or shrinks[-1] < growths[0]
    size = machine.size
    assert len(shrinks) <= -(-(size.full - size.least) // max(1, size.full // 4)) + 2
    assert len(growths) <= 100 // max(1, machine.size.full // 16) + 1
    assert not any(changes[-200:])


def test_a_process_that_comes_and_goes_moves_the_cache_less_and_less() -> None:
    machine = Machine(1200, PressureRule(RESERVE, SLOT), FULL)
    growths = []
    for second in range(2000):
        machine.others = 400 if second % 20 < 10 else 0  # it comes back every 20 s
        growths.append(machine.step(1, fill=80) > 0)
    assert sum(growths[:400]) > 3 * sum(growths[-400:])
