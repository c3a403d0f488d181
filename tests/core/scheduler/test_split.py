from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from greenroom.core.cache.reshape import initial_tier_slots
from greenroom.core.cache.secondary import SecondarySlots
from greenroom.core.cache.state import group_sizes
from greenroom.core.events import Computed, Finish, Landed, Predicted, Resized, Routed
from greenroom.core.events import StartChunk as Start
from greenroom.core.pieces import Pieces, Split
from greenroom.core.prefetch.accuracy import PredictionCounts
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, RandomDriver, carry_out, groups, ids
from tests.core.strategies import steps

N = OFFSETS[-1]


def split(tops=(60, 60), bottoms=(40, 40), secondary_slots=3) -> Split:
    return Split(tops, bottoms, secondary_slots)


def scheduler(capacity: int, lanes: int = 1, of: Split | None = None, **options) -> Scheduler:
    every = Pieces.with_split(OFFSETS, of or split())
    return Scheduler(every, capacity, policy("lru"), lanes=lanes, **options)


def test_pieces_are_top_segments_then_bottom_segments():
    every = Pieces.with_split([0, 2, 3], Split((60, 100), (40, 0), 2), [3, 3, 5, 2, 2, 0])
    assert every.nbytes.tolist() == [60, 60, 100, 40, 40, 0]
    assert [every.secondary_of(expert) for expert in range(3)] == [3, 4, -1]
    assert every.layer.tolist() == [0, 0, 1, 0, 0, 1]
    assert len(every.primary) == every.experts == 3
    assert every.primary.chunks.tolist() == [3, 3, 5]


def test_top_segments_get_the_memory_that_bottom_segments_leave():
    """8 whole experts of 100 bytes, three slots of 40 for bottoms: 680 bytes, 11 tops of 60.

    Equal layers have 5.67 each: 80 bytes are left of two times five, and the first has one more. By
    3 to 1, 380 bytes make 4.75 and 1.58: again 80 bytes are left, for the larger remainder.
    """
    every = Pieces.with_split(OFFSETS, split())
    assert group_sizes(every, 8, "shared") == [11]
    assert group_sizes(every, 8, "per-layer") == [6, 5]
    assert group_sizes(every, 8, (3.0, 1.0)) == [6, 5]  # no more than there are experts
    assert group_sizes(every, 5, (3.0, 1.0)) == [5, 1]
    uneven = Pieces.with_split(OFFSETS, split((25, 50), (75, 50)))  # 575 bytes
    assert group_sizes(uneven, 8, "per-layer") == [6, 8 - 2]
    with pytest.raises(
        BudgetError,
        match=r"memory for 1 experts, but --split needs memory for .* 3 bottom",
    ):
        group_sizes(every, 1, "shared")


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=2),
    st.lists(st.floats(0.1, 9.0), min_size=2, max_size=2),
    st.integers(1, 2 * N),
)
def test_slots_of_tops_fit_their_memory_and_leave_less_than_one_a_layer(sizes, shares, capacity):
    """Each layer has at least its whole slots; what is left is less than the largest slot."""
    tops, bottoms = zip(*sizes, strict=True)
    assume(any(bottoms))
    of = split(tops, bottoms)
    every, most = Pieces.with_split(OFFSETS, of), np.diff(OFFSETS)
    for scope in ("per-layer", tuple(shares)):
        assume(fits(every, capacity, scope))
        counts = group_sizes(every, capacity, scope)
        left = capacity * of.unsplit_bytes - of.reserved - np.dot(counts, tops)
        assert left >= 0
        assert all(1 <= count <= n for count, n in zip(counts, most, strict=True))
        assert left < max(tops) or list(counts) == list(most)


def test_a_hit_s_top_segment_is_computed_while_its_bottom_segment_arrives():
    s = scheduler(8)
    (start,) = s.on(Routed(0, 0, ids(1)))
    assert (start.piece, start.slot) == (1, 0)
    landed = s.on(Landed(0, 1))
    assert [a.piece for a in landed if isinstance(a, Start)] == [N + 1]
    assert groups(landed) == [([1], 0)]
    assert s.on(Landed(0, N + 1)) == []
    assert groups(s.on(Computed())) == [([1], 1)]
    assert s.on(Computed()) == [Finish()]

    s.on(Routed(1, 0, ids(2)))  # something else has the bottoms' slots, one after another
    for piece in (2, N + 2):
        s.on(Landed(0, piece))
    s.on(Computed())
    s.on(Computed())
    actions = s.on(Routed(2, 0, ids(1, 2)))
    assert groups(actions) == [([1, 2], 0)]  # both bottoms are still there
    assert groups(s.on(Computed())) == [([1, 2], 1)]
    assert s.on(Computed()) == [Finish()]
    c = s.counts
    assert (c.requests, c.hits, c.bottoms, c.bottom_hits) == (4, 2, 4, 2)


def test_bottom_segments_share_few_slots_in_turn():
    s = scheduler(8, of=split(secondary_slots=1), lanes=4)
    starts = s.on(Routed(0, 0, ids(0, 1)))
    assert [a.piece for a in starts] == [0, 1, N]
    assert end(s, starts) == [([0], 0), ([1], 0), ([0], 1), ([1], 1)]
    assert s.counts.misses == 2


def test_layers_may_be_unsplit_among_split_ones():
    s = scheduler(8, of=split((100, 60), (0, 40)), scope="per-layer")
    assert [a.piece for a in s.on(Routed(0, 0, ids(3)))] == [3]
    assert groups(s.on(Landed(0, 3))) == [([3], 0)]
    assert s.on(Computed()) == [Finish()]
    assert s.counts.bottoms == 0


def test_only_the_bottom_segment_of_a_hit_is_prefetched():
    """Expert 7's top stays; other bottoms have taken the slot of its bottom."""
    s = scheduler(11, ahead=2, of=split(secondary_slots=2))
    for number, expert in enumerate((7, 8, 9)):
        serve(s, number, 1, expert)
    assert not s.placement.secondary.is_complete(7)
    serve(s, 3, 0, 0)
    started = [a for a in s.on(Predicted(1, ids(7))) if isinstance(a, Start)]
    assert [(a.piece, a.demand) for a in started] == [(N + 7, False)]
    s.on(Landed(0, N + 7))
    assert groups(s.on(Routed(4, 1, ids(7)))) == [([7], 0)]
    assert (s.counts.prefetches, s.counts.useful) == (1, 1)
    assert s.counts.bottom_hits == 1
    assert s.view.accuracy.counts == {(1, 1): PredictionCounts(1, 1, absent=1, fetched=1)}


def test_a_split_expert_is_in_time_with_both_segments():
    """Expert 7's top arrives, and its bottom does not; of 9 both are resident."""
    s = scheduler(11, ahead=2)
    serve(s, 0, 1, 9)
    serve(s, 1, 0, 0)
    started = [a for a in s.on(Predicted(1, ids(9, 7))) if isinstance(a, Start)]
    assert [a.piece for a in started] == [7]
    s.on(Landed(0, 7))
    s.on(Routed(2, 1, ids(7, 9)))
    assert s.view.accuracy.counts == {(1, 1): PredictionCounts(2, 2, absent=1, fetched=0)}


def serve(s: Scheduler, number: int, layer: int, *experts: int) -> list[tuple[list[int], int]]:
    """A step from its routing to its end, its groups."""
    return end(s, s.on(Routed(number, layer, ids(*experts))))


def end(s: Scheduler, actions: list) -> list[tuple[list[int], int]]:
    """Carry out what there is to do until the step is over, its groups."""
    return groups(carry_out(s, actions, transfers_first=True))


def test_an_unused_bottom_segment_stays_until_its_slot_is_needed():
    b = SecondarySlots([2], [0] * N)
    assert (b.claim(1), b.claim(2), b.claim(3)) == (0, 1, -1)
    b.landed(1)
    b.release(1)
    assert b.is_complete(1)
    assert not b.is_complete(2)
    assert b.claim(3) == 0
    assert not b.is_complete(1)
    b.free(3)
    assert b.claim(3) == 0


def test_prefetches_have_half_of_the_slots():
    b = SecondarySlots([4], [0] * N)
    assert [b.begin_prefetch(e, 0) for e in range(3)] == [0, 1, -1]
    b.landed(0)
    assert sorted(b.end_prefetches(0, {1})) == [(0, True)]
    assert b.claim(1) == 1
    assert b.begin_prefetch(5, 0) >= 0


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (((60,), (0,), 2), "--split leaves the experts of every layer unsplit"),
        (((0,), (40,), 2), "a top segment must have at least 1 byte"),
        (((60,), (40,), 0), "the cache of bottom segments has 0 slots"),
    ],
)
def test_invalid_splits_are_refused(of, message):
    with pytest.raises(UsageError, match=message):
        Split(*of)


@given(
    steps=steps(LAYERS, EXPERTS),
    capacity=st.integers(0, 11),
    lanes=st.sampled_from([(1,), (2,), (3,), (2, 1)]),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer", (3.0, 1.0)]),
    of=st.sampled_from([((60, 60), (40, 40)), ((30, 80), (70, 20)), ((100, 50), (0, 50))]),
    secondary_slots=st.integers(1, 7),
    ahead=st.sampled_from([0, 0, 1, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    named=st.sampled_from(["lru", "next-use", "arc"]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_any_order_of_events_computes_every_part_once_after_its_top(
    steps, capacity, lanes, chunks, scope, of, secondary_slots, ahead, failing, named, devices, seed
):
    cut, sizes = Split(*of, secondary_slots), np.where(np.arange(2 * N) < N, chunks, 2).tolist()
    every = Pieces.with_split(OFFSETS, cut, sizes, devices)
    least = next(n for n in range(1, 40) if fits(every, n, scope))
    s = Scheduler(every, least + capacity, policy(named), lanes=lanes, scope=scope, ahead=ahead)
    driver = RandomDriver(s, random.Random(seed), failing)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 5:
            driver.predict((layer + chance) % LAYERS, seed + number)
        driver.run(number, layer, experts, cancel, prefill)
        if cancel or driver.finish.failed >= 0:
            assert len(driver.computed) == len(set(driver.computed))
        else:
            needed = {*experts.tolist(), *map(every.secondary_of, experts.tolist())} - {-1}
            assert sorted(driver.computed) == sorted(needed)
        if chance == 9:
            active = (0, 1) if (seed + number) % 3 else (0,)
            driver.send(Resized(least + seed % 12, number % 4, None, active[:devices]))
        for piece in s.residents().tolist():
            assert driver.memory[s.placement.slot(piece)] == piece
        for expert, slot in s.placement.secondary.slot_of.items():
            if s.placement.secondary.is_complete(expert):
                assert driver.memory[s.placement.secondary_tier_slot(slot)] == N + expert
        assert not s.placement.cache.state.pinned.any()
    while driver.moving:
        driver.land()
    assert len(s.transfers.entries) == 0
    assert not s.placement.resizing
    assert sorted(s.placement.tier_slots) == sorted(initial_tier_slots(s.placement.cache))
    assert sum(group_sizes(every, s.capacity, scope)) == s.placement.cache.capacity
    c = s.counts
    over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed
    waiting = len(s.placement.buffer.borrowed) + len(s.placement.secondary._ahead)
    assert over + waiting == c.prefetches
    free = sum(map(len, s.placement.secondary._free))
    assert len(s.placement.secondary.slot_of) + free == s.placement.secondary.capacity
    assert s.placement.secondary.capacity == max(secondary_slots, len(every.active_devices))


def fits(every: Pieces, capacity: int, scope) -> bool:
    try:
        return bool(group_sizes(every, capacity, scope))
    except BudgetError:
        return False
