from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.events import (
    Cancelled,
    Compute,
    Computed,
    Failed,
    Finish,
    Landed,
    Move,
    Resized,
    Routed,
    StartChunk,
    Trim,
)
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler import Scheduler
from greenroom.policies import policy
from tests.core.reference import ReferenceCache

LAYERS, EXPERTS = 2, 6
OFFSETS = [0, 6, 12]


def pieces(chunks: int = 1) -> Pieces:
    return Pieces.whole(OFFSETS, [100] * LAYERS, [chunks] * OFFSETS[-1])


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
    assert s.cache.residents().tolist() == []
    assert len(s.queue) == 0


def test_a_cancelled_step_keeps_what_has_arrived():
    s = scheduler(6, lanes=1)
    s.on(Routed(0, 0, ids(1, 2)))
    s.on(Landed(0, 1))
    assert s.on(Cancelled()) == []
    assert s.on(Landed(0, 2)) == [Finish()]
    assert s.cache.residents().tolist() == [1, 2]


def test_a_resize_waits_for_the_end_of_the_step():
    s = scheduler(4, lanes=4)
    for action in s.on(Routed(0, 0, ids(0, 1, 2, 3))):
        s.on(Landed(action.lane, action.piece))
    assert s.on(Resized(2)) == []
    while not isinstance((actions := s.on(Computed()))[-1], Finish):
        pass
    assert actions[-2] == Trim(2)
    assert s.cache.residents().tolist() == [2, 3]
    assert all(isinstance(a, Move) for a in actions[:-2])


def test_two_steps_at_a_time_are_refused():
    s = scheduler(2)
    s.on(Routed(0, 0, ids(0)))
    with pytest.raises(RuntimeError, match="under way"):
        s.on(Routed(0, 0, ids(1)))


class Theatre:
    """A driver in which anything may happen next: chunks land or fail and waves end in any order.

    `memory[slot]` is the piece whose chunks have all landed there, as a real slot would hold it.
    """

    def __init__(self, s: Scheduler, rng: random.Random, failing: float) -> None:
        self.s, self.rng, self.failing = s, rng, failing
        self.memory: dict[int, int] = {}
        self.landed: dict[int, int] = {}
        self.moving: list[StartChunk] = []
        self.wave: Compute | None = None
        self.computed: list[int] = []
        self.finish: Finish | None = None

    def take(self, actions: list) -> None:
        for action in actions:
            match action:
                case StartChunk(lane, piece, slot, chunk):
                    assert lane not in {m.lane for m in self.moving}
                    if chunk == 0:
                        self.memory.pop(slot, None)
                        self.landed[piece] = 0
                    if self.wave is not None:
                        assert slot not in self.wave.slots
                    self.moving.append(action)
                case Compute(experts, slots):
                    assert self.wave is None
                    assert [self.memory[int(slot)] for slot in slots] == experts.tolist()
                    assert not {m.slot for m in self.moving} & set(slots.tolist())
                    self.wave = action
                case Move(piece, source, target):
                    assert self.memory[source] == piece
                    self.memory[target] = self.memory[source]
                case Finish():
                    assert not self.moving
                    self.finish = action

    def run(self, step: int, layer: int, experts: np.ndarray, cancel: bool) -> None:
        self.computed, self.finish, self.wave = [], None, None
        self.take(self.s.on(Routed(step, layer, experts)))
        while self.finish is None:
            choices = ["land"] * len(self.moving) + ["compute"] * (self.wave is not None)
            assert choices, "deadlock"
            if cancel and self.rng.random() < 0.2:
                cancel, self.wave = False, None
                self.take(self.s.on(Cancelled()))
            elif self.rng.choice(choices) == "compute":
                self.computed += self.wave.experts.tolist()
                self.wave = None
                self.take(self.s.on(Computed()))
            else:
                self._land(self.moving.pop(self.rng.randrange(len(self.moving))))

    def _land(self, action: StartChunk) -> None:
        if self.rng.random() < self.failing:
            self.take(self.s.on(Failed(action.lane, action.piece)))
            return
        self.landed[action.piece] += 1
        if self.landed[action.piece] == self.s.pieces.chunks[action.piece]:
            self.memory[action.slot] = action.piece
        self.take(self.s.on(Landed(action.lane, action.piece)))


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS),
            st.integers(0, 9),
        ),
        max_size=20,
    ),
    capacity=st.integers(2, 13),
    lanes=st.integers(1, 3),
    chunks=st.integers(1, 3),
    scope=st.sampled_from(["shared", "per-layer"]),
    failing=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_events_computes_every_expert_once_from_its_own_bytes(
    steps, capacity, lanes, chunks, scope, failing, seed
):
    s = Scheduler(pieces(chunks), capacity, policy("lru"), lanes=lanes, scope=scope)
    theatre = Theatre(s, random.Random(seed), failing)
    reference = ReferenceCache(OFFSETS, [capacity], "lru")
    clean, hits = scope == "shared", 0
    for number, (layer, chosen, chance) in enumerate(steps):
        experts = ids(*(OFFSETS[layer] + e for e in sorted(chosen)))
        cancel = chance == 0
        theatre.run(number, layer, experts, cancel)
        if cancel or theatre.finish.failed >= 0:
            clean = False
            assert len(theatre.computed) == len(set(theatre.computed))
        else:
            assert sorted(theatre.computed) == experts.tolist()
        if chance == 9:
            theatre.take(s.on(Resized(1 + seed % 13 if scope == "shared" else 2 + seed % 12)))
            clean = False
        for piece in s.cache.residents().tolist():  # what counts as resident is there, whole
            assert theatre.memory[int(s.cache.state.slot_of[piece])] == piece
        assert not s.cache.state.pinned.any()
        assert len(s.queue) == 0
        if clean:
            hits += sum(hit for hit, _ in reference.step(experts.tolist()))
            assert s.counts.hits == hits
