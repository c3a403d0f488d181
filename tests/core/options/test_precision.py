from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.reshape import initial_tier_slots
from greenroom.core.cache.scope import least_capacity
from greenroom.core.cache.state import group_sizes
from greenroom.core.config.base import Approximation
from greenroom.core.events import (
    Computed,
    ComputeGroup,
    Finish,
    Landed,
    Predicted,
    Resized,
    Routed,
)
from greenroom.core.events import StartChunk as Start
from greenroom.core.gates import expert_tail_weights, tail_weights
from greenroom.core.options.rules.precision import precision
from greenroom.core.options.rules.substitutes import Substitutes
from greenroom.core.pieces import Copies, Pieces
from greenroom.core.plan import EXACT, LOW, SKIP
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.core.transfers.tiers import HostTier
from greenroom.errors import BudgetError, UsageError
from greenroom.policies import policy
from tests.core.random_driver import EXPERTS, LAYERS, OFFSETS, RandomDriver, carry_out, groups, ids
from tests.core.strategies import steps as steps_of
from tests.core.transfers.test_tiers import HostTierDriver, check_host

N = OFFSETS[-1]


def copies(nested: bool = False, secondary_slots: int = 4) -> Copies:
    return Copies.of(100, 0.25 if not nested else 0.5, LAYERS, secondary_slots, nested=nested)


def scheduler(
    capacity: int, at: Approximation, nested=False, secondary_slots=4, lanes=1, **options
):
    every = Pieces.with_copies(
        OFFSETS, copies(nested, secondary_slots), options.pop("chunks", None)
    )
    return Scheduler(
        every, capacity, policy("lru"), lanes=lanes, options=[precision(at, every)], **options
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def end(s: Scheduler, actions: list) -> tuple[list[tuple[list[int], int]], list[int]]:
    """Carry out a step: transfers first and in their order. (groups, pieces that were moved)."""
    done = carry_out(s, actions, transfers_first=True)
    return groups(done), [a.piece for a in done if isinstance(a, Start)]


def test_a_tail_weight_is_the_share_of_an_expert_and_all_lower_ranks():
    """Weights 0.5, 0.25, 0.25: HOBBIT's scores are 0, 0.5 and 0.75."""
    assert tail_weights(np.array([[1.0, 2.0, 1.0]])).tolist() == [[0.5, 1.0, 0.25]]
    assert tail_weights(np.array([[0.0, 0.0]])).tolist() == [[1.0, 1.0]]
    chosen = np.array([[3, 5], [5, 9]])
    tail_weight_of = expert_tail_weights(
        chosen, np.array([[0.75, 0.25], [0.75, 0.25]]), np.array([3, 5, 9])
    )
    assert tail_weight_of.tolist() == [1.0, 1.0, 0.25]  # 5 is what matters most to the second token
    masked = expert_tail_weights(np.array([[3, 16]]), np.array([[0.5, 0.5]]), np.array([3]))
    assert masked.tolist() == [1.0]


def test_a_miss_of_a_low_tail_weight_is_computed_from_its_copy():
    s = scheduler(6, Approximation(low=0.4))
    groups, moved = end(s, s.on(Routed(0, 0, ids(0, 1, 2), tail_weights=floats(1.0, 0.39, 0.4))))
    assert moved == [0, 2, N + 1]  # exact ones in their order, then copies
    assert sorted(groups) == [([0], EXACT), ([1], LOW), ([2], EXACT)]
    assert s.residents().tolist() == [0, 2]
    groups, moved = end(s, s.on(Routed(1, 0, ids(0, 1), tail_weights=floats(1.0, 0.1))))
    assert (groups, moved) == ([([0], EXACT), ([1], LOW)], [])  # the copy is still there
    c = s.counts
    assert (c.requests, c.hits, c.misses, c.low, c.low_hits) == (5, 1, 4, 2, 1)


def test_hits_and_prompts_are_exact():
    s = scheduler(6, Approximation(low=1.0, skip=0.5))
    end(s, s.on(Routed(0, 0, ids(0, 1), tail_weights=floats(1.0, 0.1), prefill=True)))
    assert s.residents().tolist() == [0, 1]
    groups, _ = end(s, s.on(Routed(1, 0, ids(0, 1), tail_weights=floats(0.1, 1.0))))
    assert groups == [([0, 1], EXACT)]
    end(s, s.on(Routed(2, 0, ids(2, 3))))  # no tail weights
    assert s.counts.low == s.counts.skipped == 0


def test_a_miss_below_the_skip_threshold_is_not_computed():
    s = scheduler(6, Approximation(low=0.4, skip=0.1))
    groups, moved = end(s, s.on(Routed(0, 0, ids(0, 1, 2), tail_weights=floats(1.0, 0.3, 0.05))))
    assert moved == [0, N + 1]
    assert sorted(groups) == [([0], EXACT), ([1], LOW), ([2], SKIP)]
    assert (s.counts.low, s.counts.skipped, s.counts.misses) == (1, 1, 3)


def test_a_miss_is_computed_with_the_expert_most_often_chosen_with_it():
    every = Pieces.unsplit(OFFSETS, [100] * LAYERS)
    substitutes = precision(Approximation(substitute=0.3), every)
    s = Scheduler(every, 6, policy("lru"), lanes=1, options=[substitutes])
    for number, experts in enumerate([(0, 1), (0, 2), (0, 2), (3, 1)]):
        end(s, s.on(Routed(number, 0, ids(*sorted(experts)), tail_weights=floats(1.0, 1.0))))
    assert s.residents().tolist() == [0, 1, 2, 3]
    s.placement.cache.remove(0, 9)
    actions = s.on(Routed(9, 0, ids(0, 3), tail_weights=floats(0.2, 1.0)))
    (group,) = [a for a in actions if isinstance(a, ComputeGroup)]
    two, three = (s.placement.slot(e) for e in (2, 3))
    assert dict(zip(group.experts.tolist(), group.slots.tolist(), strict=True)) == {
        0: two,
        3: three,
    }
    assert s.placement.cache.state.pinned[2] == 1
    assert s.on(Computed()) == [Finish()]
    assert not s.placement.cache.state.pinned.any()
    groups, moved = end(s, s.on(Routed(10, 0, ids(4, 5), tail_weights=floats(0.1, 1.0))))
    assert moved == [4, 5]  # 4 was never chosen with any that is there: it is fetched
    assert (s.counts.substituted, len(groups)) == (1, 2)


def test_a_substitute_is_allowed_and_was_chosen_with_the_expert():
    b = Substitutes([0, 4, 8])
    b.count(1, ids(4, 5, 6))
    b.count(1, ids(4, 6))
    allowed = np.array([False, True, True, True])
    assert b.find(1, 4, allowed) == 6
    assert b.find(1, 4, allowed & [True, True, False, True]) == 5
    assert b.find(1, 4, np.array([True, False, False, True])) == -1 or b.counts[1][0, 0]
    assert b.find(1, 7, allowed) == -1


def test_a_nested_copy_becomes_exact_by_its_remainder():
    s = scheduler(6, Approximation(low=0.4), nested=True)
    end(s, s.on(Routed(0, 0, ids(0, 1), tail_weights=floats(1.0, 0.2))))
    actions = s.on(Routed(1, 0, ids(0, 1), tail_weights=floats(0.3, 1.0)))
    (start,) = [a for a in actions if isinstance(a, Start)]
    assert (start.piece, start.copy_slot) == (
        2 * N + 1,
        s.placement.secondary_tier_slot(s.placement.secondary.slot_of[1]),
    )
    assert start.first_of_piece
    groups, _ = end(s, actions)
    assert groups[-1] == ([1], EXACT)
    assert s.residents().tolist() == [0, 1]
    assert s.counts.joined == 1


def test_the_exact_expert_is_promoted_while_the_link_is_idle():
    s = scheduler(10, Approximation(low=0.4, promote=True), ahead=2)
    groups, moved = end(s, s.on(Routed(0, 0, ids(0, 1), tail_weights=floats(1.0, 0.2))))
    assert moved == [0, N + 1, 1]  # behind the demands
    assert sorted(groups) == [([0], EXACT), ([1], LOW)]
    s.on(Landed(0, 1))
    assert s.residents().tolist() == [0, 1]
    assert (s.counts.low, s.counts.prefetches, s.counts.promoted) == (1, 1, 1)
    groups, moved = end(s, s.on(Routed(1, 0, ids(1), tail_weights=floats(0.2))))
    assert (groups, moved) == ([([1], EXACT)], [])
    assert (s.counts.hits, s.counts.low) == (1, 1)


def test_no_expert_is_promoted_by_default():
    s = scheduler(10, Approximation(low=0.4), ahead=2)
    _, moved = end(s, s.on(Routed(0, 0, ids(0, 1), tail_weights=floats(1.0, 0.2))))
    assert moved == [0, N + 1]
    assert len(s.transfers.entries) == 0


def test_copies_take_slots_from_exact_experts():
    every = Pieces.with_copies(OFFSETS, copies(secondary_slots=5))  # 125 bytes: two experts' slots
    assert group_sizes(every, 8, "shared") == [6]
    assert group_sizes(every, 8, "per-layer") == [3, 3]
    assert least_capacity(every, "shared") == 3
    assert every.nbytes.tolist() == [100] * N + [25] * N
    assert every.secondary_of(3) == N + 3
    with pytest.raises(
        BudgetError, match=r"memory for 2 experts, but --miss-precision needs .* for 5 low"
    ):
        group_sizes(every, 2, "shared")
    nested = Pieces.with_copies(OFFSETS, copies(nested=True))
    assert (len(nested), nested.secondary_of(3)) == (3 * N, N + 3)
    assert nested.nbytes[[0, N, 2 * N]].tolist() == [100, 50, 50]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (((100,), (100,), (), 2), "must be smaller than its expert"),
        (((100,), (50,), (), 0), "the cache of low-precision copies has 0 slots"),
    ],
)
def test_invalid_copies_are_refused(of, message):
    with pytest.raises(UsageError, match=message):
        Copies(*of)


def test_a_host_tier_is_refused_for_nested_copies():
    every = Pieces.with_copies(OFFSETS, copies(nested=True))
    with pytest.raises(UsageError, match=r"nested copies .* and --host-memory .* exclude each"):
        HostTier(every, 4, policy("lru"))


def links_of(actions: list) -> list[tuple[int, int]]:
    """The (link, piece) of every chunk that was moved, in order."""
    return [(a.link, a.piece) for a in actions if isinstance(a, Start)]


def test_a_miss_of_low_weight_takes_its_copy_from_host_memory():
    every = Pieces.with_copies(OFFSETS, Copies.of(100, 0.25, LAYERS, 1, nested=False))
    tier = HostTier(every, 3, policy("lru"))
    at = precision(Approximation(low=0.4), every)
    s = Scheduler(every, 4, policy("lru"), lanes=(1, 1), host=tier, options=[at])

    def run(step: int, expert: int, tail: float) -> list[tuple[int, int]]:
        weights = floats(tail)
        return links_of(carry_out(s, s.on(Routed(step, 0, ids(expert), tail_weights=weights))))

    assert run(0, 1, 0.3) == [(0, N + 1), (1, N + 1)]
    assert run(1, 2, 0.3) == [(0, N + 2), (1, N + 2)]  # takes the device's only slot of copies
    assert run(2, 1, 0.3) == [(1, N + 1)]
    assert run(3, 1, 1.0) == [(0, 1), (1, 1)]  # exact: the copy in host memory is of no use
    assert [[*each.slots()] for each in tier.caches] == [[1], [1, 2]]
    assert (s.counts.low, s.counts.low_hits) == (3, 0)


def test_skipped_experts_move_nothing_over_either_link():
    every = Pieces.unsplit(OFFSETS, [100] * LAYERS)
    tier = HostTier(every, 3, policy("lru"))
    at = precision(Approximation(skip=0.2), every)
    s = Scheduler(every, 4, policy("lru"), lanes=(1, 1), host=tier, options=[at])
    weights = floats(1.0, 0.1)
    assert links_of(carry_out(s, s.on(Routed(0, 0, ids(1, 2), tail_weights=weights)))) == [
        (0, 1), (1, 1),
    ]  # fmt: skip
    assert tier.requests == 1


class PrecisionDriver(RandomDriver):
    """A driver that checks the weights of each expert: exact, copy, or joined."""

    def _holds(self, slot: int, piece: int) -> bool:
        return self.memory[slot] in (piece, 2 * N + piece)

    def _start(self, action: Start) -> None:
        assert (action.link, action.lane) not in {(m.link, m.lane) for m in self.moving}
        self._check_home_device(action)
        if action.first_of_piece:
            self.landed[action.piece, action.slot] = 0
            assert (action.copy_slot >= 0) == (action.piece >= 2 * N)
            if action.copy_slot >= 0:
                assert self.memory[action.copy_slot] == N + action.piece % N
        self.memory.pop(action.slot, None)
        self._check_no_overwrite(action)
        self.moving.append(action)

    def _check_slots(self, group: ComputeGroup) -> None:
        for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
            self._from(expert, slot, group.part)

    def _results(self, group: ComputeGroup) -> list[int]:
        return group.experts.tolist()

    def _from(self, expert: int, slot: int, part: int) -> None:
        if part == SKIP:
            assert slot == -1
            return
        stored_piece = self.memory.get(slot)
        assert stored_piece is not None
        if part == LOW:
            assert stored_piece == N + expert
        elif stored_piece % N != expert:  # a substitute, resident and of the same layer
            assert stored_piece < N or stored_piece >= 2 * N
            assert self.s.pieces.layer[stored_piece % N] == self.s.pieces.layer[expert]
            assert self.s.placement.cache.state.pinned[stored_piece % N]
        else:
            assert not N <= stored_piece < 2 * N


@given(
    steps=steps_of(LAYERS, EXPERTS, 25),
    capacity=st.integers(0, 11),
    lanes=st.sampled_from([1, 2, 3]),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer", (3.0, 1.0)]),
    nested=st.booleans(),
    follow=st.booleans(),
    at=st.sampled_from(
        [(0.4, 0.0, 0.0), (0.9, 0.1, 0.0), (0.5, 0.0, 0.9), (0.9, 0.2, 0.5), (0.0, 0.3, 0.6)]
    ),
    secondary_slots=st.integers(1, 7),
    ahead=st.sampled_from([0, 0, 1, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    named=st.sampled_from(["lru", "next-use", "arc"]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_any_order_of_events_computes_every_request_once(
    steps,
    capacity,
    lanes,
    chunks,
    scope,
    nested,
    follow,
    at,
    secondary_slots,
    ahead,
    failing,
    named,
    devices,
    seed,
):
    sizes = [chunks] * (3 if nested else 2) * N
    every = Pieces.with_copies(OFFSETS, copies(nested, secondary_slots), sizes, devices)
    least = least_capacity(every, scope)
    s = Scheduler(
        every, least + capacity, policy(named), lanes=lanes, scope=scope, ahead=ahead,
        options=[precision(Approximation(*at, promote=follow), every)],
    )  # fmt: skip
    stage, rng = PrecisionDriver(s, random.Random(seed), failing), np.random.default_rng(seed)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        weights = rng.random(experts.size)
        if chance > 6:
            stage.send(Predicted((layer + chance) % LAYERS, experts % EXPERTS + OFFSETS[layer]))
        before = s.counts.requests
        stage.run(number, layer, experts, cancel, prefill, tail_weights(weights))
        assert s.counts.requests - before == experts.size
        if cancel or stage.finish.failed >= 0:
            assert len(stage.computed) == len(set(stage.computed))
        else:
            assert sorted(stage.computed) == experts.tolist()
        if chance == 9:
            active = (0, 1) if (seed + number) % 3 else (0,)
            stage.send(Resized(least + seed % 12, number % 4, None, active[:devices]))
        for piece in s.residents().tolist():
            stored_piece = stage.memory[s.placement.slot(piece)]
            assert stored_piece in (piece, 2 * N + piece)
        for expert, slot in s.placement.secondary.slot_of.items():
            if s.placement.secondary.is_complete(expert):
                assert stage.memory[s.placement.secondary_tier_slot(slot)] == N + expert
        assert not s.placement.cache.state.pinned.any()
        assert not s.transfers.copy_slots
        assert not s.placement.secondary._busy
    while stage.moving:
        stage.land()
    assert len(s.transfers.entries) == 0
    assert not s.placement.resizing
    assert sorted(s.placement.tier_slots) == sorted(initial_tier_slots(s.placement.cache))
    free = sum(map(len, s.placement.secondary._free))
    assert len(s.placement.secondary.slot_of) + free == s.placement.secondary.capacity
    assert s.placement.secondary.capacity == max(secondary_slots, len(every.active_devices))
    c = s.counts
    assert c.low + c.skipped + c.substituted <= c.misses
    assert c.low_hits <= c.low


class PrecisionHostDriver(PrecisionDriver, HostTierDriver):
    """A driver that also checks the bytes of each slot in host memory."""

    _start = HostTierDriver._start


@given(
    steps=steps_of(LAYERS, EXPERTS),
    device=st.integers(0, 11),
    host=st.integers(1, 13),
    lanes=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    chunks=st.integers(1, 3),
    follow=st.booleans(),
    at=st.sampled_from([(0.4, 0.0, 0.0), (0.9, 0.1, 0.0), (0.9, 0.2, 0.5)]),
    secondary_slots=st.integers(1, 7),
    ahead=st.sampled_from([0, 0, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    devices=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_over_two_links(
    steps, device, host, lanes, chunks, follow, at, secondary_slots, ahead, failing, devices, seed
):
    copies = Copies.of(100, 0.25, LAYERS, secondary_slots, nested=False)
    every = Pieces.with_copies(OFFSETS, copies, [chunks] * N + [2] * N, devices)
    tier = HostTier(every, max(host, devices), policy("lru"), seed=seed)
    least = least_capacity(every, "shared")
    s = Scheduler(
        every, least + device, policy("lru"), lanes=lanes, ahead=ahead, host=tier,
        options=[precision(Approximation(*at, promote=follow), every)],
    )  # fmt: skip
    stage, rng = PrecisionHostDriver(s, random.Random(seed), failing), np.random.default_rng(seed)
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 6:
            stage.send(Predicted((layer + chance) % LAYERS, experts % EXPERTS + OFFSETS[layer]))
        tails = tail_weights(rng.random(experts.size))
        stage.run(number, layer, experts, cancel, prefill, tails)
        if cancel or stage.finish.failed >= 0:
            assert len(stage.computed) == len(set(stage.computed))
        else:
            assert sorted(stage.computed) == experts.tolist()
        if chance == 9:
            stage.send(Resized(least + seed % 12, number % 4))
        assert not s.placement.cache.state.pinned.any()
        assert not s.placement.secondary._busy
    while stage.moving:
        stage.land()
    assert len(s.transfers.entries) == 0
    check_host(tier, stage)
