"""A small model, and a driver with random events for tests of the scheduler."""

from __future__ import annotations

import random

import numpy as np

from greenroom.core.cache.buffer import BorrowState
from greenroom.core.cache.reshape import kinds_of
from greenroom.core.events import (
    Action,
    Cancelled,
    Computed,
    ComputeGroup,
    Failed,
    Finish,
    Landed,
    Move,
    Predicted,
    Routed,
    StartChunk,
)
from greenroom.core.pieces import Pieces
from greenroom.core.scheduler.scheduler import Scheduler

LAYERS, EXPERTS = 2, 6
OFFSETS = [0, 6, 12]


def pieces(chunks: int = 1, devices: int = 1, placement: str = "experts") -> Pieces:
    every = [chunks] * OFFSETS[-1]
    return Pieces.unsplit(OFFSETS, [100] * LAYERS, every, devices, placement=placement)


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


class RandomDriver:
    """A driver in which anything may happen next: chunks land or fail and groups end in any order.

    `memory[slot]` is the piece whose chunks have all landed there, as a real slot would hold it;
    `staging_slots[staging_slot]` is the chunk that a staging slot holds.
    """

    def __init__(self, s: Scheduler, rng: random.Random, failing: float) -> None:
        self.s, self.rng, self.failing = s, rng, failing
        self.chained = len(s.transfers.queue.paths[0]) > 1
        self.lasts = {path[-1] for path in s.transfers.queue.paths}
        self.memory: dict[int, int] = {}
        self.landed: dict[tuple[int, int], int] = {}  # (piece, slot) -> chunks
        self.staging_slots: dict[int, tuple[int, int]] = {}
        self.moving: list[StartChunk] = []
        self.groups: dict[int, ComputeGroup] = {}
        self.computed: list[int] = []
        self.finish: Finish | None = None
        self.now = 0.0

    def send(self, event) -> None:
        self.now += self.rng.random()
        for action in self.s.on(event, self.now):
            match action:
                case StartChunk():
                    self._start(action)
                case ComputeGroup():
                    assert action.device not in self.groups
                    self._check_slots(action)
                    self.groups[action.device] = action
                case Move(piece, source, target):
                    assert self._holds(source, piece)
                    assert not self.moving
                    self.memory[target] = self.memory[source]
                case Finish():
                    demands = {
                        p for p, e in self.s.transfers.queue.entries.items() if e.urgency == 0
                    }
                    assert not demands, "a demand outlives its step"
                    self.finish = action
        self._check()

    def _holds(self, slot: int, piece: int) -> bool:
        return self.memory[slot] == piece

    def _check_slots(self, group: ComputeGroup) -> None:
        experts, slots = group.experts, group.slots
        assert {*self.s.pieces.home_device[experts].tolist()} == {group.device}
        stored = [self.memory.get(int(slot)) for slot in slots]
        assert stored == (experts + group.part * self.s.pieces.experts).tolist()
        self._check_top_computed(experts, group.part)
        assert not {m.slot for m in self.moving} & set(slots.tolist())

    def _start(self, action: StartChunk) -> None:
        assert (action.link, action.lane) not in {(m.link, m.lane) for m in self.moving}
        chunk = (action.piece, action.chunk)
        if action.link == 0 and self.chained:
            assert action.staging_slot not in {m.staging_slot for m in self.moving}
            self.staging_slots[action.staging_slot] = chunk
        elif self.chained:
            assert self.staging_slots[action.staging_slot] == chunk, (
                "the staging slot was given away"
            )
        self._check_home_device(action)
        if (
            action.link in self.s.view.sources and action.chunk == 0
        ):  # from the start, whatever came before
            self.landed = {k: n for k, n in self.landed.items() if k[0] != action.piece}
            self.landed[action.piece, action.slot] = 0
        if action.link in self.lasts:
            self.memory.pop(action.slot, None)
            self._check_no_overwrite(action)
        self.moving.append(action)

    def _check_no_overwrite(self, action: StartChunk) -> None:
        """Check that no transfer writes to a slot of a running group."""
        assert not any(action.slot in group.slots for group in self.groups.values())

    def _check_home_device(self, action: StartChunk) -> None:
        """Check that a piece goes to its home device, on that device's link."""
        home = int(self.s.pieces.home_device[action.piece])
        assert action.link in self.s.transfers.queue.paths[home]
        kinds, pieces = kinds_of(self.s.placement.cache), self.s.pieces
        kind, secondary = 0, pieces.experts <= action.piece < 2 * pieces.experts
        if secondary:
            kind = kinds // pieces.devices - 1
        elif pieces.split is not None:  # the tops of each group of a device have their own slots
            group = int(self.s.placement.cache.state.group_of[action.piece])
            kind = group % (kinds // pieces.devices - 1)
        assert action.slot % kinds == kind * pieces.devices + home

    def _check_top_computed(self, experts: np.ndarray, part: int) -> None:
        """Check that a bottom segment runs after its top segment, which is still in its slot."""
        if part:
            assert {*experts.tolist()} <= {*self.computed}
            at = np.searchsorted(self.s.step.experts, experts)
            assert [
                self.memory[int(slot)] for slot in np.array(self.s.step.slots)[at]
            ] == experts.tolist()

    def _check(self) -> None:
        """Check that every complete entry of the buffer has all of its bytes in its slot."""
        for piece, entry in self.s.placement.buffer.borrowed.items():
            assert self.s.placement.cache.state.slot_of[piece] < 0, "in the cache and in the buffer"
            if entry.state is BorrowState.COMPLETE:
                assert self.memory.get(int(self.s.placement.tier_slots[entry.slot])) == piece

    def run(
        self,
        step: int,
        layer: int,
        experts: np.ndarray,
        cancel=False,
        prefill=False,
        tail_weights=None,
    ) -> None:
        self.computed, self.finish, self.groups = [], None, {}
        self.send(Routed(step, layer, experts, prefill=prefill, tail_weights=tail_weights))
        while self.finish is None:
            choices = ["land"] * len(self.moving) + ["compute"] * len(self.groups)
            assert choices, "deadlock"
            if cancel and self.rng.random() < 0.2:
                cancel, self.groups = False, {}
                self.send(Cancelled())
            elif self.rng.choice(choices) == "compute":
                group = self.groups.pop(self.rng.choice(sorted(self.groups)))
                self.computed += self._results(group)
                self.send(Computed(group.device))
            else:
                self.land()

    def _results(self, group: ComputeGroup) -> list[int]:
        return (group.experts + group.part * self.s.pieces.experts).tolist()

    def land(self) -> None:
        action = self.moving.pop(self.rng.randrange(len(self.moving)))
        if self.rng.random() < self.failing:
            self.landed = {k: n for k, n in self.landed.items() if k[0] != action.piece}
            self.send(Failed(action.lane, action.piece, action.link))
            return
        self._arrived(action)
        self.send(Landed(action.lane, action.piece, action.link))

    def _arrived(self, action: StartChunk) -> None:
        if action.link in self.lasts:
            key = action.piece, action.slot
            if key in self.landed:
                self.landed[key] += 1
                if self.landed[key] == self.s.pieces.chunks[action.piece]:
                    self.memory[action.slot] = action.piece
                    del self.landed[key]

    def predict(self, layer: int, seed: int) -> None:
        expected = random.Random(seed).sample(range(EXPERTS), 4)
        self.send(Predicted(layer, ids(*(OFFSETS[layer] + e for e in expected))))


def carry_out(s: Scheduler, actions: list[Action], transfers_first: bool = False) -> list[Action]:
    """Carry out actions, in order or transfers first, until the step is over; return them all."""
    done: list[Action] = []
    waiting: list[Action] = []
    while True:
        done += actions
        waiting += actions
        if any(isinstance(action, Finish) for action in actions):
            return done
        if transfers_first:
            waiting.sort(key=lambda action: isinstance(action, ComputeGroup))
        match waiting.pop(0):
            case StartChunk() as chunk:
                actions = s.on(Landed(chunk.lane, chunk.piece, chunk.link))
            case ComputeGroup() as group:
                actions = s.on(Computed(group.device))


def groups(actions: list[Action]) -> list[tuple[list[int], int]]:
    """(experts, part) of each group that was ordered."""
    return [(a.experts.tolist(), a.part) for a in actions if isinstance(a, ComputeGroup)]
