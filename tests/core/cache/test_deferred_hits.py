"""A policy to which steps of hits are reported later decides as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.cache import MOST_HITS, Cache
from greenroom.core.pieces import Pieces
from greenroom.policies import POLICIES, policy
from tests.core.strategies import steps
from tests.policies.plain import plain_policies

LAYERS, EXPERTS = 2, 6
NAMES = sorted(name for name, each in POLICIES.items() if not each.needs_trace)


def arrays(policy_state: Any) -> Iterator[list[float]]:
    """Every array of a policy's state, as lists."""
    for each in policy_state:
        if isinstance(each, tuple | list):
            yield from arrays(each)
        else:
            yield np.asarray(each).ravel().tolist()


class CachePair:
    """Two caches that must act the same: the policy of the second is called in every step."""

    def __init__(self, name: str, capacity: int, devices: int, seed: int) -> None:
        every = Pieces.unsplit([0, EXPERTS, 2 * EXPERTS], [1, 1], devices=devices)
        self.both = [Cache(every, capacity, policy(name), seed=seed) for _ in range(2)]
        self.both[1]._most_hits = 1
        self.requested: tuple[np.ndarray, ...] = ()  # of the step under way, where it is pinned
        self.borrowed: list[tuple[int, int]] = []  # (piece, slot)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ours, immediate = (getattr(cache, method)(*args, **kwargs) for cache in self.both)
        assert ours == immediate
        return ours

    def serve(self, number: int, layer: int, chosen: set[int], digit: int) -> None:
        requested = np.array(sorted(chosen), np.int64) + EXPERTS * layer
        room = min(map(self.both[0].unpinned_slots, range(len(self.both[0].sizes))))
        while self.borrowed and requested.size + len(self.borrowed) > room:  # the step comes first
            self.call("return_slot", self.borrowed.pop(0)[1])
        requested = np.setdiff1d(requested, [piece for piece, _ in self.borrowed])
        more: dict[str, Any] = {"request": number // 7, "fill": 1 if digit == 9 else -1}
        if digit % 2:
            more |= {"rows": np.full(requested.size, 2, np.int32)}
            more |= {"weights": np.linspace(0.1, 0.9, requested.size, dtype=np.float32)}
        ours, immediate = (cache.serve(requested, number, **more) for cache in self.both)
        for name in ("slots", "hits", "evicted"):
            assert getattr(ours, name).tolist() == getattr(immediate, name).tolist()
        assert (ours.pinned, ours.misses) == (immediate.pinned, immediate.misses)
        self.requested = (requested,) if ours.pinned else ()

    def during(self, digit: int) -> None:
        """Something that may happen before a step is over, or after it."""
        piece = digit + 2
        absent = self.both[0].state.slot_of[piece] < 0
        if digit in (5, 6) and absent and piece not in dict(self.borrowed):
            slot, _ = self.call("borrow", piece)
            if slot >= 0:
                self.borrowed.append((piece, slot))
        elif digit == 7 and self.borrowed:
            piece, slot = self.borrowed.pop(0)
            room = self.both[0].state.free_count.sum() or not self.requested
            self.call("admit" if room else "return_slot", *((piece, slot) if room else (slot,)))

    def end(self, split: bool) -> None:
        """A step's pins end, of all its pieces or of some before others."""
        for pieces in self.requested:
            parts = (pieces[:1], pieces[1:]) if split else (pieces,)
            for cache in self.both:
                for part in parts:
                    cache.release(part)
        self.requested = ()

    def between(self, digit: int, number: int) -> None:
        if digit == 3:
            self.call("remove", number % (2 * EXPERTS), number)
        elif digit == 4 and not self.borrowed:
            self.call("resize", 4 + number % 9)
        elif digit == 8:
            for cache in self.both:
                cache.pin(np.array([number % 4], np.int64))

    def check_equal(self) -> None:
        ours, immediate = self.both
        for cache in self.both:
            cache.pin_hits()
        assert [list(each) for each in arrays(ours.state)] == list(arrays(immediate.state))
        assert repr(list(arrays(ours.policy_states))) == repr(
            list(arrays(immediate.policy_states))
        )  # some are no numbers


@pytest.mark.parametrize("name", NAMES)
@given(
    steps=steps(LAYERS, EXPERTS),
    capacity=st.integers(4, 12),
    devices=st.sampled_from([1, 1, 2]),
    looks=st.integers(1, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
@plain_policies()
def test_a_policy_that_sees_hits_later_decides_the_same(
    name, steps, capacity, devices, looks, seed
):
    pair = CachePair(name, capacity, devices, seed)
    for number, (layer, chosen, digit) in enumerate(steps):
        pair.serve(number, layer, chosen, digit)
        pair.during(digit)
        pair.end(split=digit == 2)
        pair.during(9 - digit)
        pair.between(digit, number)
        if number % looks == looks - 1:
            pair.check_equal()
    pair.check_equal()


def test_hits_are_reported_after_a_limited_number_of_steps():
    immediate = []
    cache = Cache(Pieces.unsplit([0, 4], [1]), 3, policy("lru"))
    cache.serve(np.arange(3), 0)
    cache.release(np.arange(3))
    compiled = cache._bound
    cache._bound = compiled._replace(serve=lambda *args: immediate.append(len(args[5])) or 0)
    for number in range(MOST_HITS + 2):
        assert cache.serve(np.arange(2), number, "none").misses == 0
    assert immediate == [MOST_HITS]
    cache.borrow(3)
    assert immediate == [MOST_HITS, 2]


def test_a_step_of_hits_is_pinned_before_a_victim_is_chosen():
    cache = Cache(Pieces.unsplit([0, 4], [1]), 2, policy("lru"))
    cache.serve(np.arange(2), 0)
    cache.release(np.arange(2))
    requested = np.array([0])
    cache.serve(requested, 1)
    assert cache.borrow(3)[1] == 1  # the only one that is not of the step
    assert cache.state.pinned.tolist() == [1, 0, 0, 0]
    cache.release(requested)
    assert not cache.state.pinned.any()
