"""Decoder layers that follow one another, for one token in one parallel region.

Where every expert has a slot nothing is decided between two layers, and Python between them takes
as long as a tenth of the weights: so the first layer computes those that follow, and they find
their outputs made. Before, it is found out in a pass that each is given just what the one before it
returned. The bits are those of the layers one by one; where a choice is torch's (router.py), or an
expert has yet to come, the region is left at that layer and entered again behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from greenroom.core.whole import Tables
from greenroom.runtime.kernels import program
from greenroom.runtime.kernels.attention import Positions, Room
from greenroom.runtime.kernels.guard import Guard
from greenroom.runtime.kernels.program import Program


class Experts(program.Experts, Protocol):
    """The experts of layers that follow one another."""

    def several(self, first: int, find: Callable[[Tables], Sequence[int]]) -> int | None:
        """`Driver.several` for the layers from number `first` on."""


class Link(program.Link, Protocol):
    """One of the layers: what is asked of `decoder.OneLayer`."""

    @property
    def index(self) -> int:
        """Its number in a cache."""

    def takes(self, x: Tensor, kwargs: dict[str, Any]) -> bool: ...

    @property
    def guard(self) -> Guard:
        """That everything in it is as it is now, and nobody listens to what is in it."""

    def room(self, cache: Any) -> Room | None: ...

    def from_choice(
        self, state: Tensor, index: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor:
        """The output, from what the stages up to the choice left, and the choice."""


class _Pass(threading.local):
    """What a thread's pass has come to."""

    def __init__(self) -> None:
        self.before: tuple[int, Tensor, Tensor, dict[str, Any]] | None = None
        self.made: tuple[dict[str, Any], Sequence[Tensor]] | None = None  # that will be asked for
        self.program: Program | None = None


class Chain:
    """Layers of one kind that may follow one another in a model.

    make_experts: their experts, or None: they are no matter of one region
    take_back:    takes a layer's last token out of a cache again
    """

    def __init__(
        self,
        links: Sequence[Link],
        make_experts: Callable[[], Experts | None],
        take_back: Callable[[Any, int], None],
    ) -> None:
        self._links = tuple(links)
        self._make_experts, self._take_back = make_experts, take_back
        self._experts: Experts | None = None
        self._in_order: bool | None = None  # not known yet
        self._guard: Guard | None = None
        self._pass = _Pass()

    def saw(self, number: int, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> None:
        """Layer `number` computed `out` from x by itself: is that the next one's x?"""
        if self._in_order is not None:
            return
        before, last = self._pass.before, number == len(self._links) - 1
        self._pass.before = None if last else (number, out, out.clone(), kwargs)
        if number == 0 or before is None or before[0] != number - 1:
            return
        _, given, copy, others = before
        if x is not given or not torch.equal(x, copy) or not _same(kwargs, others):
            self._in_order, self._pass.before = False, None
        elif last:
            self._experts = self._make_experts()
            self._in_order = self._experts is not None

    def __call__(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Layer `number`'s output for x [1, 1, hidden]; None: it is to compute that by itself."""
        if not self._in_order:
            return None
        mine = self._pass
        made, mine.made = mine.made, None
        if number == 0:
            return self._begin(x, kwargs)
        if made is None or number >= len(made[1]):
            return None
        others, outputs = made
        if x is not outputs[number - 1] or not _same(kwargs, others):
            self._in_order = False
            self._forget(others, number, len(outputs))
            return None
        if number < len(outputs) - 1:
            mine.made = made
        return outputs[number]

    def _intact(self) -> bool:
        """Are all layers what they were when this was first found so, and does nobody listen?"""
        if self._guard is None:
            guard = Guard()
            for link in self._links:
                guard.include(link.guard)
            if not guard.holds():
                return False
            self._guard = guard
        return self._guard.holds()

    def _forget(self, kwargs: dict[str, Any], first: int, end: int) -> None:
        """The layers from number `first` on have not seen this token."""
        for link in self._links[first:end]:
            self._take_back(kwargs["past_key_values"], link.index)

    def _begin(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Compute as many layers as can be; the first one's output."""
        if not self._intact() or not self._links[0].takes(x, kwargs):
            return None
        assert self._experts is not None
        token = _Token(self._links, self._experts, self._pass, x, kwargs)
        try:
            while token.next < len(self._links) and token.go_on():
                pass
        finally:
            self._forget(kwargs, token.next, len(token.rooms))
        if token.next > 1:
            self._pass.made = kwargs, token.outputs[: token.next]
        return token.outputs[0] if token.next else None


def _same(kwargs: dict[str, Any], others: dict[str, Any]) -> bool:
    """Are two layers given the same besides hidden states?"""
    names = ("position_embeddings", "past_key_values", "attention_mask", "together")
    return all(kwargs.get(name) is others.get(name) for name in names)


class _Token:
    """A token on its way through the layers, which has come to number `next`; its `outputs`, and
    the `rooms` that it was given in the layers' caches."""

    def __init__(
        self,
        links: Sequence[Link],
        experts: Experts,
        state: _Pass,
        x: Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        self._links, self._experts, self._pass = links, experts, state
        self._x, self._kwargs = x, kwargs
        self.next, self.rooms = 0, list[Room]()
        self._used: Program | None = None
        self._all = torch.empty(len(links), *x.shape, dtype=x.dtype)
        self.outputs = self._all.unbind()

    def go_on(self) -> bool:
        """Go through the layers that come next, and through one that Python computes from its
        choice on. False where none can be."""
        done = self._experts.several(self.next, self._region)
        if done is None or (program := self._used) is None:
            return False
        self.next += done
        if self.next < len(self._links):
            # The program's own memory is the next token's too.
            index, weights = (each.clone() for each in program.asked[self.next].answer())
            link = self._links[self.next]
            out = link.from_choice(program.state, index, weights, program.residual)
            self.outputs[self.next].copy_(out.view(self._x.shape))
            self.next += 1
        return True

    def _region(self, tables: Tables) -> Sequence[int]:
        """How many experts each of the next layers computed, until one that did not."""
        if not self.rooms and not self._make_room():
            return []
        program = self._program()  # also where Python was between, and may have moved memory
        if program is not self._used:
            program.set(self._x, self._positions, self.rooms, self._all)
            self._used = program
        return program.run(self.next, tables)

    @property
    def _positions(self) -> Positions:
        positions: Positions = self._kwargs["position_embeddings"]
        return positions

    def _program(self) -> Program:
        """The last token's, where it fits this one."""
        known = self._pass.program
        if known is None or not known.fits(self._positions, self.rooms):
            known = Program(self._links, self._experts, self._x, self._positions, self.rooms)
            self._pass.program = known
        return known

    def _make_room(self) -> bool:
        """Room for the token in every layer's cache; False where one has none."""
        cache = self._kwargs["past_key_values"]
        for link in self._links:
            room = link.room(cache)
            if room is None:
                return False
            self.rooms.append(room)
        return True
