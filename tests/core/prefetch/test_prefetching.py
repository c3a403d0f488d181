"""The event machine with prefetching, worked by hand: 3 layers of 4 experts, so that layer 1 has
the pieces 4 to 7 and layer 2 those from 8 on. Nothing is known of times: every chance is 1/2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.events import (
    Cancelled,
    Computed,
    ComputeGroup,
    Failed,
    Finish,
    Landed,
    Predicted,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UsageError
from greenroom.policies import policy

LAYERS, EXPERTS = 3, 4


def ids(*pieces: int) -> np.ndarray:
    return np.array(pieces, np.int64)


class ManualDriver:
    """A scheduler, and its actions whose end it has not observed yet."""

    def __init__(self, capacity: int = 8, ahead: int = 2, *, lanes=1, chunks: int = 1, **kwargs):
        total = LAYERS * EXPERTS
        offsets = list(range(0, total + 1, EXPERTS))
        pieces = Pieces.unsplit(offsets, [100] * LAYERS, [chunks] * total)
        self.s = Scheduler(pieces, capacity, policy("lru"), lanes=lanes, ahead=ahead, **kwargs)
        self.moving: list[StartChunk] = []
        self.group: ComputeGroup | None = None
        self.passes = 0

    def send(self, event: Any, now: float = 0.0) -> list[Any]:
        actions = self.s.on(event, now)
        self.moving += [a for a in actions if isinstance(a, StartChunk)]
        for action in actions:
            self.group = action if isinstance(action, ComputeGroup) else self.group
        return actions

    def started(self, event: Any, now: float = 0.0) -> list[tuple[int, int, bool]]:
        """(piece, chunk, is it a demand) of the chunks that an event starts."""
        actions = self.send(event, now)
        return [(a.piece, a.chunk, a.demand) for a in actions if isinstance(a, StartChunk)]

    def landed(self, kind=Landed) -> Landed | Failed:
        """The event of the chunk that was started first."""
        first = self.moving.pop(0)
        return kind(first.lane, first.piece, first.link)

    def predict(self, layer: int, *pieces: int) -> list[tuple[int, int, bool]]:
        return self.started(Predicted(layer, ids(*pieces)))

    def route(self, layer: int, *pieces: int, prefill: bool = False) -> list[Any]:
        self.passes += 1
        return self.send(Routed(self.passes, layer, ids(*pieces), prefill=prefill))

    def finish(self, actions: list[Any]) -> Finish:
        """Let all land and be computed until the step is over."""
        while not any(isinstance(a, Finish) for a in actions):
            if self.group is not None:
                self.group = None
                actions = self.send(Computed())
            else:
                actions = self.send(self.landed())
        return actions[-1]

    def step(self, layer: int, *pieces: int, prefill: bool = False) -> Finish:
        return self.finish(self.route(layer, *pieces, prefill=prefill))

    def settle(self) -> None:
        while self.moving:
            self.send(self.landed())

    @property
    def residents(self) -> list[int]:
        return self.s.residents().tolist()

    @property
    def free(self) -> int:
        return int(self.s.placement.cache.state.free_count.sum())


def test_prefetches_follow_the_priorities_of_a_predictor():
    """Nearest first, 4 and 5 of layer 1 would come before 9 of layer 2."""
    for priorities, order in ((None, [4, 5, 9]), ((0.4, 0.1, 0.3), [4, 9, 5])):
        h = ManualDriver(12, ahead=3)
        h.step(0, 0)
        h.send(Routed(h.passes + 1, 0, ids(1)))  # its read keeps the link busy
        parts = (None, None) if priorities is None else np.split(np.array(priorities), [2])
        h.send(Predicted(1, ids(4, 5), priorities=parts[0]))
        h.send(Predicted(2, ids(9), priorities=parts[1]))
        started = []
        while h.moving:
            actions = h.send(h.landed())
            started += [a.piece for a in actions if isinstance(a, StartChunk)]
        assert started == order


def test_a_predicted_expert_is_fetched_while_the_link_is_idle_and_is_a_hit():
    h = ManualDriver()
    h.step(0, 0)
    assert h.predict(1, 5) == [(5, 0, False)]
    slot = h.moving[0].slot
    assert h.send(h.landed()) == []
    (compute,) = h.route(1, 5)
    assert (compute.experts.tolist(), compute.slots.tolist()) == ([5], [slot])
    counts = h.s.counts
    assert (counts.requests, counts.hits, counts.useful, counts.late) == (2, 1, 1, 0)
    assert h.residents == [0, 5]
    assert not h.s.placement.buffer.borrowed


def test_a_resident_or_arriving_expert_is_not_fetched_again():
    h = ManualDriver(lanes=2)
    h.step(0, 0)
    assert h.predict(0, 0) == []
    assert h.predict(1, 5) == [(5, 0, False)]
    assert h.predict(1, 5) == []
    assert h.s.counts.prefetches == 1


def test_a_demand_goes_first_and_waits_for_one_chunk_a_lane():
    h = ManualDriver(lanes=2, chunks=3)
    assert h.predict(1, 5, 6) == [(5, 0, False), (5, 1, False)]
    assert [type(a) for a in h.route(0, 1)] == []
    assert h.started(h.landed()) == [(1, 0, True)]
    assert h.started(h.landed()) == [(1, 1, True)]
    assert h.started(h.landed()) == [(1, 2, True)]
    assert h.started(h.landed()) == [(5, 2, False)]  # a lane that demands have no use for


def test_an_upgrade_keeps_the_chunks_that_have_landed():
    h = ManualDriver(chunks=3)
    h.step(0, 0)
    assert h.predict(1, 5) == [(5, 0, False)]
    assert h.started(h.landed()) == [(5, 1, False)]
    assert h.route(1, 5) == []
    assert h.started(h.landed()) == [(5, 2, True)]
    (compute,) = h.send(h.landed())
    assert compute.experts.tolist() == [5]
    counts = h.s.counts
    assert (counts.late, counts.useful, counts.hits) == (1, 0, 0)


def test_a_step_reads_on_what_is_under_way_before_it_reads_what_has_not_begun():
    """ProMoE, 5.3: resident experts first, then those under way, then those not begun.

    7 has a chunk on the lane and one to come; 4 and 5 have not begun, and have smaller ids.
    """
    h = ManualDriver(chunks=3)
    h.step(1, 6)
    h.step(0, 0)
    assert h.predict(1, 7) == [(7, 0, False)]
    assert h.started(h.landed()) == [(7, 1, False)]
    (compute,) = h.route(1, 4, 5, 6, 7)
    assert compute.experts.tolist() == [6]
    assert h.started(h.landed()) == [(7, 2, True)]
    order = []
    h.group = None
    h.send(Computed())
    while len(order) < 3:
        actions = h.send(h.landed())
        if computed := [a for a in actions if isinstance(a, ComputeGroup)]:
            order += computed[0].experts.tolist()
            h.send(Computed())
    assert order == [7, 4, 5]


def test_prefetches_under_way_are_read_on_in_the_order_in_which_they_began():
    """Over two links: behind the first chunk of 7 on the second link, 7 and then 6 wait."""
    h = ManualDriver(chunks=2, lanes=(2, 1))
    h.step(0, 0)
    assert h.predict(1, 7, 6) == [(7, 0, False), (7, 1, False)]
    h.send(h.landed())
    h.send(h.landed())
    assert [(a.piece, a.chunk, a.link) for a in h.moving] == [(7, 0, 1), (6, 0, 0), (6, 1, 0)]
    h.moving.append(h.moving.pop(0))
    h.send(h.landed())  # the first chunk of 6 reaches the queue of the second link
    h.route(1, 4, 6, 7)
    second = []
    while h.moving:
        second += [(a.piece, a.chunk) for a in h.moving if a.link == 1]
        h.send(h.landed())
    assert list(dict.fromkeys(second)) == [(7, 0), (7, 1), (6, 0), (6, 1), (4, 0), (4, 1)]


def test_wrong_prefetches_under_way_are_dropped_when_the_routing_is_known():
    """5 has a chunk on the lane, which lands before the demand's first; 6 was only a candidate."""
    h = ManualDriver(chunks=3)
    h.step(0, 0)
    assert h.predict(1, 5, 6) == [(5, 0, False)]
    assert h.route(1, 7) == []
    assert h.s.counts.dropped == 1
    assert h.started(h.landed()) == [(7, 0, True)]
    assert h.finish([]).failed < 0
    h.settle()
    assert h.residents == [0, 7]
    assert (h.free, h.s.counts.prefetches, h.s.counts.wasted) == (6, 1, 0)


def test_a_prefetch_for_another_layer_is_not_dropped():
    h = ManualDriver(chunks=3)
    h.step(0, 0)
    h.predict(2, 9)
    h.step(1, 4)
    h.settle()
    assert h.s.placement.buffer.borrowed[9].state is BorrowState.COMPLETE
    assert h.s.counts.dropped == h.s.counts.wasted == 0


def test_a_wrong_prefetch_gives_its_slot_to_the_next_miss():
    h = ManualDriver()
    h.step(0, 0, 1, 2, 3)
    h.step(1, 4, 5, 6, 7)
    h.predict(2, 8)
    h.settle()
    assert h.residents == [1, 2, 3, 4, 5, 6, 7]  # 0 was the least recently used
    slot = int(h.s.placement.tier_slots[h.s.placement.buffer.borrowed[8].slot])
    actions = h.route(2, 9)
    assert [(a.piece, a.slot) for a in actions] == [(9, slot)]
    h.finish([])
    assert h.s.counts.wasted == 1
    assert h.residents == [1, 2, 3, 4, 5, 6, 7, 9]


def test_the_policy_observes_a_prefetch_when_it_is_requested():
    """9 came before 0 was asked for again, but was asked for after it: 1 is older than both."""
    h = ManualDriver(4, 1)
    h.step(0, 0, 1)
    h.predict(2, 9)
    h.settle()
    h.step(0, 0)
    h.step(2, 9)
    h.step(1, 4, 5)
    assert h.residents == [0, 4, 5, 9]


def chances(h: ManualDriver, **by_layer: list[float]) -> None:
    """The estimated chance of use of each rank."""
    h.s.lookahead._chances = lambda layer, width: np.array(by_layer[f"layer{layer}"][:width])


def test_a_likelier_prefetch_takes_the_slot_of_one_that_waits():
    h = ManualDriver(4, 1)
    chances(h, layer1=[0.9], layer2=[0.6])
    h.step(0, 0)
    h.predict(2, 9)
    h.settle()
    assert h.predict(1, 5) == [(5, 0, False)]
    assert list(h.s.placement.buffer.borrowed) == [5]
    assert h.s.counts.displaced == 1
    h.settle()
    assert h.predict(2, 9) == []  # and not the other way round
    assert h.s.counts.displaced == 1


def test_nearer_layers_go_first():
    h = ManualDriver()
    h.route(0, 0)
    h.predict(2, 9)
    h.predict(1, 5)
    assert h.started(h.landed()) == [(5, 0, False)]
    assert h.started(h.landed()) == [(9, 0, False)]


def test_no_more_slots_are_borrowed_than_configured():
    h = ManualDriver(8, 9, lanes=4)
    assert h.s.placement.buffer.size == 2
    h.step(0, 0)
    assert len(h.predict(1, 4, 5, 6, 7)) == 2
    h.settle()
    assert sorted(h.s.placement.buffer.borrowed) == [4, 5]


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_cache_too_small_for_borrowed_slots_prefetches_nothing(capacity):
    h = ManualDriver(capacity, 8)
    h.step(0, 0, 1)
    assert h.predict(1, 5) == []
    h.step(1, 5, prefill=True)
    h.step(2, 8, 9, 10, 11)
    assert h.s.counts.prefetches == 0
    assert len(h.residents) == capacity


def test_a_prompt_streams_through_borrowed_slots_and_evicts_no_resident():
    """All slots are taken: layer 2 passes through the two that may be borrowed."""
    h = ManualDriver()
    h.step(0, 0, 1, 2, 3)
    h.step(1, 4, 5, 6, 7)
    h.step(2, 8, 9, 10, 11, prefill=True)
    assert h.residents == [2, 3, 4, 5, 6, 7]
    assert h.free == 2
    assert h.s.counts.prefetches == 0
    counts = h.s.counts
    assert (counts.requests, counts.hits) == (12, 0)


def test_a_prompt_fills_an_empty_cache_to_an_even_share():
    h = ManualDriver(9, 2)
    for layer in range(LAYERS):
        h.step(layer, *range(layer * EXPERTS, (layer + 1) * EXPERTS), prefill=True)
    layers = [piece // EXPERTS for piece in h.residents]
    assert max(layers.count(layer) for layer in range(LAYERS)) == 3
    assert len(layers) >= 9 - 2  # but for what was borrowed


def test_a_prompt_fetches_the_next_layer_while_it_computes():
    """The link is free as soon as this layer's experts are there."""
    h = ManualDriver()
    h.route(0, 0, prefill=True)
    assert h.started(h.landed()) == [(4, 0, False)]
    assert h.finish([]).failed < 0
    h.settle()
    h.step(1, 4, 5, prefill=True)
    assert h.s.counts.useful + h.s.counts.late >= 1


def test_two_links_pass_chunks_through_staging_slots():
    h = ManualDriver(lanes=(1, 1), chunks=2)
    h.step(0, 0)
    assert h.predict(1, 5) == [(5, 0, False)]
    (first,) = h.moving
    onward, second = h.send(h.landed())
    assert (onward.link, onward.chunk, onward.staging_slot) == (1, 0, first.staging_slot)
    assert (second.link, second.chunk) == (0, 1)
    assert second.staging_slot != first.staging_slot
    assert h.send(h.landed()) == []  # link 1 is free, the second chunk is not there yet
    (onward,) = h.send(h.landed())
    assert (onward.link, onward.chunk, onward.staging_slot) == (1, 1, second.staging_slot)
    assert h.s.placement.buffer.borrowed[5].state is BorrowState.MOVING
    h.send(h.landed())
    assert h.s.placement.buffer.borrowed[5].state is BorrowState.COMPLETE


def test_a_demand_overtakes_prefetched_chunks_on_the_second_link_too():
    """Chunk 0 of the prefetched 5 is on link 1, its chunk 1 is staged; a chunk of 0 comes."""
    h = ManualDriver(lanes=(1, 1), chunks=2, staging_slots=4)
    h.predict(1, 5)
    slow, second = h.send(h.landed())
    assert (slow.link, second.link) == (1, 0)
    h.moving = []
    h.send(Landed(second.lane, 5, 0))  # staged behind the one on link 1
    (demand,) = h.route(0, 0)
    assert (demand.piece, demand.link) == (0, 0)
    h.send(Landed(demand.lane, 0, 0))
    onward = [a for a in h.send(Landed(slow.lane, 5, 1)) if a.link == 1]
    assert [(a.piece, a.chunk) for a in onward] == [(0, 0)]


def test_prefetches_leave_staging_slots_for_demands():
    """Three staging_slots, one lane: a prefetch may take two."""
    h = ManualDriver(lanes=(1, 1), chunks=9, staging_slots=3)
    h.predict(1, 5)
    slow, second = h.send(h.landed())
    assert h.send(Landed(second.lane, 5, 0)) == []
    (demand,) = h.route(0, 0)
    assert demand.staging_slot not in {slow.staging_slot, second.staging_slot}


def test_a_failed_prefetch_returns_its_slot_and_its_demand_starts_again():
    h = ManualDriver(chunks=2)
    h.step(0, 0)
    h.predict(1, 5)
    assert h.started(h.landed()) == [(5, 1, False)]
    assert h.send(h.landed(Failed)) == []
    assert (h.s.counts.failed, h.free, len(h.s.placement.buffer.borrowed)) == (1, 7, 0)
    (start,) = h.route(1, 5)
    assert (start.piece, start.chunk, start.demand) == (5, 0, True)
    assert h.finish([]).failed < 0


def test_a_demand_that_replaces_a_failed_prefetch_fails_only_its_own_step():
    h = ManualDriver(chunks=2)
    h.step(0, 0)
    h.predict(1, 5)
    assert h.route(1, 5) == []
    (again,) = h.send(h.landed(Failed))
    assert (again.piece, again.chunk, again.demand) == (5, 0, True)
    assert h.send(h.landed(Failed)) == [Finish(failed=5)]
    assert (h.s.counts.late, h.s.counts.failed) == (1, 0)
    assert h.residents == [0]
    assert (h.free, len(h.s.transfers.entries)) == (7, 0)
    assert h.step(1, 5).failed < 0


def test_a_cancelled_step_keeps_prefetches_for_other_layers():
    """One lane carries a demand, the other a prefetch for the next layer."""
    h = ManualDriver(lanes=2, chunks=2)
    h.step(0, 0)
    h.predict(2, 9)
    h.send(h.landed())
    assert len(h.moving) == 1
    h.route(1, 5)
    h.moving.sort(key=lambda a: a.piece)
    demand = h.moving[0]
    assert demand.piece == 5
    actions = h.send(Cancelled())
    while h.s.step is not None:
        assert not any(isinstance(a, ComputeGroup) for a in actions)
        actions = h.send(h.landed())
    h.settle()
    assert h.residents == [0]
    assert h.s.placement.buffer.borrowed[9].state is BorrowState.COMPLETE
    assert h.free == 6


def test_a_cancelled_step_ends_a_prefetch_that_it_had_taken_over():
    h = ManualDriver(chunks=3)
    h.step(0, 0)
    h.predict(1, 5)
    h.route(1, 5)
    assert h.send(Cancelled()) == []  # the chunk on the lane lands first
    assert isinstance(h.send(h.landed())[-1], Finish)
    assert (h.residents, h.free, len(h.s.transfers.entries)) == ([0], 7, 0)
    assert not h.s.placement.buffer.borrowed


def test_a_resize_waits_for_chunks_on_lanes_and_drops_incomplete_prefetches():
    h = ManualDriver(8, lanes=2, chunks=2)
    h.step(0, 0)
    h.predict(1, 5)
    h.settle()
    h.predict(2, 9)
    assert len(h.moving) == 2
    assert h.send(Resized(6)) == []
    assert h.predict(1, 6) == []  # nothing new begins meanwhile
    assert h.send(h.landed()) == []
    assert h.send(h.landed())[-1] == Trim(6)
    counts = h.s.counts
    assert (counts.displaced, counts.dropped, counts.prefetches) == (1, 1, 2)
    assert (h.s.capacity, h.s.placement.buffer.size, h.residents, h.free) == (6, 1, [0], 5)


def test_a_resize_sets_how_many_slots_may_be_borrowed():
    h = ManualDriver(8)
    h.send(Resized(12, 1))
    assert h.s.placement.buffer.size == 1
    h.send(Resized(8))
    assert h.s.placement.buffer.size == 1
    h.send(Resized(3, 4))
    assert h.s.placement.buffer.size == 0


def test_scope_per_layer_borrows_from_the_layer_s_own_slots():
    h = ManualDriver(9, 2, scope="per-layer", lanes=2)
    h.step(0, 0, 1, 2)
    h.step(1, 4, 5, 6)
    h.step(2, 8, 9, 10)
    h.predict(1, 7)
    h.settle()
    assert h.residents == [0, 1, 2, 5, 6, 8, 9, 10]
    slot = h.s.placement.buffer.borrowed[7].slot
    assert 3 <= slot < 6
    h.step(1, 7)
    assert h.residents == [0, 1, 2, 5, 6, 7, 8, 9, 10]


def test_a_step_as_large_as_its_share_takes_the_slots_of_later_prefetches():
    """3 slots a layer, of which layer 1 has borrowed one for its next pass."""
    h = ManualDriver(9, 2, scope="per-layer")
    h.step(1, 4, 5)
    h.predict(1, 7)
    h.settle()
    h.step(0, 0)
    assert 7 in h.s.placement.buffer.borrowed
    h.step(1, 4, 5, 6)
    assert h.s.counts.wasted == 1
    assert h.residents == [0, 4, 5, 6]


def test_a_step_larger_than_the_cache_uses_slots_that_are_not_borrowed():
    h = ManualDriver(4, 1)
    h.step(0, 0)
    h.predict(2, 9)
    h.settle()
    h.step(1, 4, 5, 6, 7)
    counts = h.s.counts
    assert (counts.requests, counts.hits) == (5, 0)
    assert counts.displaced + len(h.s.placement.buffer.borrowed) == 1
    assert h.free + len(h.residents) + len(h.s.placement.buffer.borrowed) == 4


def test_chunks_are_timed_on_the_first_link_only():
    """A chunk takes 1 s on link 0 and 8 s on link 1."""
    h = ManualDriver(lanes=(1, 1))
    h.send(Routed(0, 0, ids(0)), 0.0)
    h.send(h.landed(), 1.0)
    assert h.s.lookahead.pace.chunk.value == pytest.approx(1.0)
    slow = h.moving.pop()
    h.send(Predicted(1, ids(5)), 8.0)
    h.send(h.landed(), 9.0)
    assert h.s.lookahead.pace.chunk.value == pytest.approx(1.0)
    h.send(Landed(slow.lane, slow.piece, 1), 9.0)


def test_prefetching_needs_pinned_steps():
    with pytest.raises(UsageError, match="needs --pin step, got --pin none"):
        ManualDriver(pin="none")
