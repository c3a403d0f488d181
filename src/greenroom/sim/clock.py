"""Simulated time: events drive the same scheduler that runs real models."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from greenroom.core.cost import Costs
from greenroom.core.events import (
    HOST,
    Action,
    Computed,
    ComputeGroup,
    Event,
    Finish,
    Landed,
    Routed,
    StartChunk,
)
from greenroom.core.home_devices import spread
from greenroom.core.pieces import Ints
from greenroom.core.plan import LOW, SKIP
from greenroom.core.policy import Rows, Weights
from greenroom.core.predictor import Ids, LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.scheduler.scheduler import Scheduler


class TraceStep(NamedTuple):
    """One step of a simulation: one MoE layer in one forward pass of a trace.

    step:         number of the forward pass
    experts:      ids of the chosen experts, ascending and distinct, counted over all layers
    rows:         number of tokens that chose each expert; None: one each
    tokens:       number of tokens in the pass
    weights:      sum of the gate weights of each expert over its tokens
    prefill:      whether the pass reads a prompt
    chosen:       each token's experts as ids within the layer, [tokens, top_k], for predictors
    tail_weights: importance of each expert (core/gates.py), if misses may be approximated
    """

    step: int
    layer: int
    experts: Ints
    rows: Rows | None = None
    tokens: int = 1
    request: int = 0
    weights: Weights | None = None
    prefill: bool = False
    chosen: Ids | None = None
    tail_weights: Weights | None = None


class Clock:
    """Simulated clock of a machine: memory links in a chain, and processors.

    Each device has a processor. So has the host memory, if it lies between two links. Several
    devices share the first link (from disk), and each has its own last link at full speed.
    The inputs of a step reach the other devices one after another (`Costs.hop`).

    now:         simulated time in seconds
    stall:       seconds in which all processors waited for transfers
    compute:     seconds of computation, summed over processors
    bytes_moved: bytes that were read from the store
    """

    def __init__(
        self, scheduler: Scheduler, costs: Costs, foresight: Foresight | None = None
    ) -> None:
        self.costs, self.foresight = costs, foresight
        self.now = self.stall = self.compute = 0.0
        self.bytes_moved = 0
        self.fetched: list[int] = []
        self._serial = 0
        self.restart(scheduler)

    def restart(self, scheduler: Scheduler) -> None:
        """Continue with another scheduler and its empty cache; transfers under way are dropped."""
        self.scheduler, self.pieces = scheduler, scheduler.view.pieces
        self._waited = 0.0  # seconds of stall since the last computation
        self._slowed = 0.0  # seconds by which the step's stalls slow its computing
        self._heap: list[tuple[float, int, Event]] = []
        self._fresh: set[int] = set()  # pieces fetched since they were last computed
        self.set_costs(self.costs)
        self._link_free = [0.0] * len(self._links)
        self._from_store = scheduler.view.sources
        self._step: TraceStep

    def set_costs(self, costs: Costs) -> None:
        """Use other costs from now on, for a machine with the same number of links."""
        self.costs, self._links = costs, spread(costs.links, self.pieces.devices)

    def begin(self, at: PassStart) -> None:
        """Begin a simulated forward pass, with the predictions that are made at its start."""
        if self.foresight is not None:
            for event in self.foresight.begin(at):
                self._handle(event)

    def run(self, step: TraceStep) -> None:
        """Simulate one layer: attention, routing, the experts' transfers and computation."""
        self._step, self._waits = step, False
        self._reached = {0, HOST}  # devices that have the step's inputs
        dense = self.costs.dense.seconds(step.tokens)
        self._advance(self.now + dense)
        self.compute += dense
        misses = self.scheduler.view.misses
        actions = self.scheduler.on(
            Routed(
                step.step, step.layer, step.experts, step.request, step.rows, step.weights,
                step.prefill, step.tail_weights,
            ),
            self.now,
        )  # fmt: skip
        self._waits = self.scheduler.view.misses > misses
        finished = self._carry_out(actions)
        if self.foresight is not None and step.chosen is not None:
            for predicted in self.foresight.routed(LayerRouting(step.layer, step.chosen)):
                finished |= self._handle(predicted)
        while not finished:
            idle = self.scheduler.step is not None and not self.scheduler.step.expert_groups
            due, _, event = heapq.heappop(self._heap)
            if idle:
                self.stall += due - self.now
                self._waited += due - self.now
            self.now = due
            finished = self._handle(event)
        if self._slowed:
            self.compute += self._slowed
            self._advance(self.now + self._slowed)
            self._slowed = 0.0

    def send(self, event: Event) -> None:
        """Send the scheduler an event between two layers; this takes no simulated time."""
        self._handle(event)

    def _advance(self, end: float) -> None:
        """Handle all events until the time `end`, and set the clock to it."""
        while self._heap and self._heap[0][0] <= end:
            self.now, _, event = heapq.heappop(self._heap)
            self._handle(event)
        self.now = end

    def _handle(self, event: Event) -> bool:
        """Pass an event to the scheduler and carry out its actions; True if the step has ended."""
        return self._carry_out(self.scheduler.on(event, self.now))

    def _carry_out(self, actions: list[Action]) -> bool:
        finished = False
        for action in actions:
            match action:
                case StartChunk():
                    self._start_transfer(action)
                case ComputeGroup(experts, _, device, part):
                    seconds = self._group_seconds(experts, part, device)
                    seconds += self._handling_seconds(experts, part, device)
                    seconds += self._hop_seconds(device)
                    self._slowed += self.costs.seconds_after_wait(self._waited)
                    self._waited = 0.0
                    self.compute += seconds
                    self._schedule(self.now + seconds, Computed(device))
                case Finish():
                    finished = True
        return finished

    def _start_transfer(self, action: StartChunk) -> None:
        """Queue a transfer's chunk on its simulated link, behind all earlier chunks."""
        nbytes, link = self._chunk_bytes(action.piece, action.chunk), self._links[action.link]
        free = max(self.now, self._link_free[action.link]) + nbytes / link.bandwidth
        self._link_free[action.link] = free
        self._schedule(free + link.latency, Landed(action.lane, action.piece, action.link))
        if action.link in self._from_store:
            self.bytes_moved += nbytes
        if action.first_of_piece:
            self.fetched.append(action.piece)
            completes = action.copy_slot >= 0  # the remainder of a nested copy completes its expert
            self._fresh.add(action.piece % self.pieces.experts if completes else action.piece)

    def _chunk_bytes(self, piece: int, chunk: int) -> int:
        """Return the size in bytes of a transfer's chunk; only a piece's last chunk is larger."""
        total = int(self.pieces.nbytes[piece])
        chunks = int(self.pieces.chunks[piece])
        return total // chunks + (total % chunks if chunk == chunks - 1 else 0)

    def _group_seconds(self, experts: Ints, part: int, device: int) -> float:
        """Return the seconds that computing a group of experts takes, one after another.

        A part of a split expert takes the same share of the time as it has of the bytes.
        """
        work = self.costs.host if device == HOST else self.costs.expert
        assert work is not None
        step, share = self._step, self._part_share(part)
        if step.rows is None:
            return share * experts.size * work.seconds(1)
        rows = step.rows[np.searchsorted(step.experts, experts)]
        return share * sum(work.seconds(n) for n in rows.tolist())

    def _hop_seconds(self, device: int) -> float:
        """Return the seconds until another device has a step's inputs; 0 if it has them already.

        The host serves devices in turn. The way back of the outputs is in the same time.
        """
        if device in self._reached:
            return 0.0
        self._reached.add(device)
        return (len(self._reached) - 2) * self.costs.hop

    def _handling_seconds(self, experts: Ints, part: int, device: int) -> float:
        """Return the seconds that a processor needs to take over a group's missing experts.

        In host memory they are computed in place, so they are those of the layer alone.
        """
        if device == HOST:
            return self._miss_seconds()
        pieces = experts + part * self.pieces.experts
        fresh = self._fresh.intersection(pieces.tolist())
        self._fresh -= fresh
        seconds = len(fresh) * self.costs.handling * self._part_share(part)
        return seconds + self._miss_seconds() if fresh else seconds

    def _miss_seconds(self) -> float:
        """Return the seconds of a layer that misses, at the first of its missing experts."""
        seconds, self._waits = self.costs.miss if self._waits else 0.0, False
        return seconds

    def _part_share(self, part: int) -> float:
        """Return the share of an expert's bytes that one part of a split expert has."""
        pieces, layer = self.pieces, self._step.layer
        if (split := pieces.split) is None:
            if part == LOW and pieces.copies is not None:
                return pieces.copies.low[layer] / pieces.copies.exact[layer]
            return 0.0 if part == SKIP else 1.0
        nbytes = split.tops[layer], split.bottoms[layer]
        return nbytes[part] / sum(nbytes)

    def _schedule(self, due: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, event))
