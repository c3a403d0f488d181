from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.cache.buffer import Use
from greenroom.core.cache.reshape import kinds_of
from greenroom.core.events import (
    Cancelled,
    Compute,
    Computed,
    Failed,
    Finish,
    Landed,
    Move,
    Predicted,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.policies import policy
from tests.core.reference import ReferenceCache
from tests.core.strategies import steps

LAYERS, EXPERTS = 2, 6
OFFSETS = [0, 6, 12]


def pieces(chunks: int = 1, devices: int = 1) -> Pieces:
    return Pieces.whole(OFFSETS, [100] * LAYERS, [chunks] * OFFSETS[-1], devices)


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def scheduler(capacity: int, lanes: int = 2, chunks: int = 1, scope: str = "shared") -> Scheduler:
    return Scheduler(pieces(chunks), capacity, policy("lru"), lanes=lanes, scope=scope)


def computed_in(actions: list) -> list[list[int]]:
    return [a.experts.tolist() for a in actions if isinstance(a, Compute)]


def test_residents_are_computed_first_and_arrivals_as_they_land():
    s = scheduler(6, lanes=1)
    s.on(Routed(0, 0, ids(1)))
    s.on(Landed(0, 1))
    assert s.on(Computed()) == [Finish()]

    actions = s.on(Routed(0, 1, ids(7)))
    assert [type(a) for a in actions] == [StartChunk]
    s.on(Landed(0, 7))
    s.on(Computed())

    actions = s.on(Routed(1, 0, ids(0, 1, 2)))
    assert isinstance(actions[0], StartChunk)  # the transfer starts before the wave
    assert computed_in(actions) == [[1]]
    assert computed_in(s.on(Landed(0, 0))) == []  # a wave is being computed
    assert computed_in(s.on(Computed())) == [[0]]
    assert computed_in(s.on(Landed(0, 2))) == []
    assert computed_in(s.on(Computed())) == [[2]]
    assert s.on(Computed()) == [Finish()]
    assert (s.counts.requests, s.counts.hits) == (5, 1)


def test_a_slot_is_not_overwritten_before_its_expert_is_computed():
    s = scheduler(1)
    actions = s.on(Routed(0, 0, ids(3, 4)))
    assert [a.piece for a in actions] == [3]
    assert computed_in(s.on(Landed(actions[0].lane, 3))) == [[3]]
    actions = s.on(Computed())
    assert [(a.piece, a.slot) for a in actions] == [(4, 0)]


def test_a_failure_ends_the_step_and_nothing_half_read_stays():
    s = scheduler(6, lanes=2, chunks=2)
    first, second = s.on(Routed(0, 0, ids(1, 2)))
    assert (first.piece, second.piece) == (1, 1)
    assert s.on(Failed(first.lane, 1)) == []  # the other chunk is still moving
    assert s.on(Landed(second.lane, 1)) == [Finish(failed=1)]
    assert s.residents().tolist() == []
    assert len(s.transfers.queue) == 0


def test_a_cancelled_step_keeps_what_has_arrived():
    s = scheduler(6, lanes=1)
    s.on(Routed(0, 0, ids(1, 2)))
    s.on(Landed(0, 1))
    assert s.on(Cancelled()) == []
    assert s.on(Landed(0, 2)) == [Finish()]
    assert s.residents().tolist() == [1, 2]


def test_a_resize_waits_for_the_end_of_the_step():
    s = scheduler(4, lanes=4)
    for action in s.on(Routed(0, 0, ids(0, 1, 2, 3))):
        s.on(Landed(action.lane, action.piece))
    assert s.on(Resized(2)) == []
    while not isinstance((actions := s.on(Computed()))[-1], Finish):
        pass
    assert actions[-2] == Trim(2)
    assert s.residents().tolist() == [2, 3]
    assert all(isinstance(a, Move) for a in actions[:-2])


def test_two_steps_at_a_time_are_refused():
    s = scheduler(2)
    s.on(Routed(0, 0, ids(0)))
    with pytest.raises(RuntimeError, match="under way"):
        s.on(Routed(0, 0, ids(1)))


class Theatre:
    """A driver in which anything may happen next: chunks land or fail and waves end in any order.

    `memory[slot]` is the piece whose chunks have all landed there, as a real slot would hold it;
    `seats[seat]` is the chunk that a staging seat holds.
    """

    def __init__(self, s: Scheduler, rng: random.Random, failing: float) -> None:
        self.s, self.rng, self.failing = s, rng, failing
        self.chained = len(s.transfers.queue.paths[0]) > 1
        self.lasts = {path[-1] for path in s.transfers.queue.paths}
        self.memory: dict[int, int] = {}
        self.landed: dict[tuple[int, int], int] = {}  # (piece, slot) -> chunks
        self.seats: dict[int, tuple[int, int]] = {}
        self.moving: list[StartChunk] = []
        self.waves: dict[int, Compute] = {}
        self.computed: list[int] = []
        self.finish: Finish | None = None
        self.now = 0.0

    def tell(self, event) -> None:
        self.now += self.rng.random()
        for action in self.s.on(event, self.now):
            match action:
                case StartChunk():
                    self._start(action)
                case Compute(experts, slots, device, part):
                    assert device not in self.waves
                    assert {*self.s.pieces.home[experts].tolist()} == {device}
                    ids = (experts + part * self.s.pieces.experts).tolist()
                    assert [self.memory.get(int(slot)) for slot in slots] == ids
                    self._after_its_top(experts, part)
                    assert not {m.slot for m in self.moving} & set(slots.tolist())
                    self.waves[device] = action
                case Move(piece, source, target):
                    assert self.memory[source] == piece
                    assert not self.moving
                    self.memory[target] = self.memory[source]
                case Finish():
                    demands = {
                        p for p, e in self.s.transfers.queue.entries.items() if e.urgency == 0
                    }
                    assert not demands, "a demand outlives its step"
                    self.finish = action
        self._check()

    def _start(self, action: StartChunk) -> None:
        assert (action.link, action.lane) not in {(m.link, m.lane) for m in self.moving}
        chunk = (action.piece, action.chunk)
        if action.link == 0 and self.chained:
            assert action.seat not in {m.seat for m in self.moving}
            self.seats[action.seat] = chunk
        elif self.chained:
            assert self.seats[action.seat] == chunk, "the seat was given away"
        self._at_home(action)
        if (
            action.link in self.s.transfers.queue.links_from_store and action.chunk == 0
        ):  # from the start, whatever came before
            self.landed = {k: n for k, n in self.landed.items() if k[0] != action.piece}
            self.landed[action.piece, action.slot] = 0
        if action.link in self.lasts:
            self.memory.pop(action.slot, None)
            self._spare(action)
        self.moving.append(action)

    def _spare(self, action: StartChunk) -> None:
        """Nothing is written to a slot that is being computed from."""
        assert not any(action.slot in wave.slots for wave in self.waves.values())

    def _at_home(self, action: StartChunk) -> None:
        """A piece goes to its own device, on that device's own link."""
        home = int(self.s.pieces.home[action.piece])
        assert action.link in self.s.transfers.queue.paths[home]
        kinds = kinds_of(self.s.placement.cache)
        if self.s.pieces.split is not None:  # each group's tops have slots of their own, and so on
            bottom = action.piece >= self.s.pieces.experts
            home = kinds - 1 if bottom else int(self.s.placement.cache.state.group_of[action.piece])
        assert action.slot % kinds == home

    def _after_its_top(self, experts: np.ndarray, part: int) -> None:
        """A bottom goes on where the top has ended, which is still in its slot."""
        if part:
            assert {*experts.tolist()} <= {*self.computed}
            at = np.searchsorted(self.s.step.experts, experts)
            assert [
                self.memory[int(slot)] for slot in np.array(self.s.step.slots)[at]
            ] == experts.tolist()

    def _check(self) -> None:
        """What lies in the buffer and is not moving is there, whole."""
        for piece, held in self.s.placement.buffer.held.items():
            assert self.s.placement.cache.state.slot_of[piece] < 0, "in the cache and in the buffer"
            if held.use is Use.AHEAD:
                assert self.memory.get(int(self.s.placement.place[held.slot])) == piece

    def run(self, step: int, layer: int, experts: np.ndarray, cancel: bool, prefill: bool) -> None:
        self.computed, self.finish, self.waves = [], None, {}
        self.tell(Routed(step, layer, experts, prefill=prefill))
        while self.finish is None:
            choices = ["land"] * len(self.moving) + ["compute"] * len(self.waves)
            assert choices, "deadlock"
            if cancel and self.rng.random() < 0.2:
                cancel, self.waves = False, {}
                self.tell(Cancelled())
            elif self.rng.choice(choices) == "compute":
                wave = self.waves.pop(self.rng.choice(sorted(self.waves)))
                self.computed += (wave.experts + wave.part * self.s.pieces.experts).tolist()
                self.tell(Computed(wave.device))
            else:
                self.land()

    def land(self) -> None:
        action = self.moving.pop(self.rng.randrange(len(self.moving)))
        if self.rng.random() < self.failing:
            self.landed = {k: n for k, n in self.landed.items() if k[0] != action.piece}
            self.tell(Failed(action.lane, action.piece, action.link))
            return
        if action.link in self.lasts:
            key = action.piece, action.slot
            if key in self.landed:
                self.landed[key] += 1
                if self.landed[key] == self.s.pieces.chunks[action.piece]:
                    self.memory[action.slot] = action.piece
                    del self.landed[key]
        self.tell(Landed(action.lane, action.piece, action.link))

    def predict(self, layer: int, seed: int) -> None:
        expected = random.Random(seed).sample(range(EXPERTS), 4)
        self.tell(Predicted(layer, ids(*(OFFSETS[layer] + e for e in expected))))


@given(
    steps=steps(LAYERS, EXPERTS),
    capacity=st.integers(2, 13),
    lanes=st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2)]),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer"]),
    ahead=st.sampled_from([0, 0, 1, 2, 5]),
    failing=st.sampled_from([0.0, 0.1]),
    devices=st.sampled_from([1, 1, 2, 3]),
    named=st.sampled_from(["lru", "next-use", "moe-infinity", "arc"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=400, deadline=None)
def test_any_order_of_events_computes_every_expert_once_from_its_own_bytes(
    steps, capacity, lanes, chunks, scope, ahead, failing, devices, named, seed
):
    groups = devices * (LAYERS if scope == "per-layer" else 1)
    every, capacity = pieces(chunks, devices), max(groups, capacity)
    s = Scheduler(every, capacity, policy(named), lanes=lanes, scope=scope, ahead=ahead)
    theatre = Theatre(s, random.Random(seed), failing)
    reference = ReferenceCache(OFFSETS, [s.placement.cache.capacity], "lru")
    clean, hits = scope == "shared" and devices == 1 and named == "lru", 0
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel, prefill = chance == 0, chance in (1, 2)
        if chance > 5:
            theatre.predict((layer + chance) % LAYERS, seed + number)
        clean &= s.placement.buffer.size == 0
        theatre.run(number, layer, experts, cancel, prefill)
        if cancel or theatre.finish.failed >= 0:
            clean = False
            assert len(theatre.computed) == len(set(theatre.computed))
        else:
            assert sorted(theatre.computed) == experts.tolist()
        if chance == 9:
            theatre.tell(Resized(groups + seed % 12, number % 4))
            clean = False
        for piece in s.residents().tolist():  # what counts as resident is there, whole
            assert theatre.memory[s.placement.slot(piece)] == piece
        assert not s.placement.cache.state.pinned.any()
        if clean:
            hits += sum(hit for hit, _ in reference.step(experts.tolist()))
            assert s.counts.hits == hits
    while theatre.moving:
        theatre.land()
    assert len(s.transfers.queue) == 0
    assert not s.placement.resizing
    places = [
        n * devices + d for d, share in enumerate(every.shares(s.capacity)) for n in range(share)
    ]
    assert sorted(s.placement.place) == sorted(places)
    loans = len(s.placement.buffer.held)
    assert loans + int(s.placement.cache.state.free_count.sum()) + s.residents().size == s.capacity
    c = s.counts
    over = c.useful + c.late + c.wasted + c.dropped + c.displaced + c.failed
    assert over + loans == c.prefetches
