"""Decoder layers that follow one another, for one token in one parallel region.

Where every expert has a slot nothing is decided between two layers, and Python between them takes
as long as a tenth of the weights: so the first layer computes those that follow, and they find
their outputs made. Before, it is found out in a pass that each is given just what the one before it
returned. The bits are those of the layers one by one; where a choice is torch's (router.py), or an
expert has yet to come, the region is left at that layer and entered again behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from greenroom.core.whole import Tables
from greenroom.runtime.kernels import layers, sequence
from greenroom.runtime.kernels.direct import Direct, Planned
from greenroom.runtime.kernels.openmp import BARRIER, body
from greenroom.runtime.kernels.router import Asked

Room = tuple[Tensor, Tensor]  # a layer's keys and values, with room for one more token
Find = Callable[[Sequence[Tables]], Sequence[int]]


class Experts(Protocol):
    """The experts of layers that follow one another."""

    @property
    def direct(self) -> Sequence[Direct]: ...

    def several(self, first: int, find: Find) -> int | None:
        """`Driver.several` for the layers from number `first` on."""


class Link(Protocol):
    """One of the layers: what is asked of `decoder.OneLayer`. `index` is its number in a cache."""

    @property
    def index(self) -> int: ...

    def takes(self, x: Tensor, kwargs: dict[str, Any]) -> bool: ...

    def unheard(self) -> bool:
        """Is everything in it as it was, and does nobody listen to what is in it?"""

    def room(self, cache: Any) -> Room | None: ...

    def up_to_choice(
        self, x: Tensor, positions: Any, room: Room, residual: Tensor, state: Tensor
    ) -> tuple[Sequence[sequence.Stage], Asked, object]:
        """Stages up to the choice of experts, that, and what must live until they are done."""

    def from_choice(self, state: Tensor, asked: Asked, residual: Tensor) -> Tensor:
        """The output, from what these stages left."""


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
        self._before: tuple[int, Tensor, Tensor, dict[str, Any]] | None = None
        self._made: tuple[dict[str, Any], list[Tensor]] | None = None  # what layers will ask for

    def saw(self, number: int, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> None:
        """Layer `number` computed `out` from x by itself: is that the next one's x?"""
        if self._in_order is not None:
            return
        before, last = self._before, number == len(self._links) - 1
        self._before = None if last else (number, out, out.clone(), kwargs)
        if number == 0 or before is None or before[0] != number - 1:
            return
        _, given, copy, others = before
        if x is not given or not torch.equal(x, copy) or not _same(kwargs, others):
            self._in_order, self._before = False, None
        elif last:
            self._experts = self._make_experts()
            self._in_order = self._experts is not None

    def __call__(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Layer `number`'s output for x [1, 1, hidden]; None: it is to compute that by itself."""
        if not self._in_order:
            return None
        made, self._made = self._made, None
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
            self._made = made
        return outputs[number]

    def _forget(self, kwargs: dict[str, Any], first: int, end: int) -> None:
        """The layers from number `first` on have not seen this token."""
        for link in self._links[first:end]:
            self._take_back(kwargs["past_key_values"], link.index)

    def _begin(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Compute as many layers as can be; the first one's output."""
        if not self._links[0].takes(x, kwargs) or not all(link.unheard() for link in self._links):
            return None
        assert self._experts is not None
        token = _Token(self._links, self._experts, x, kwargs)
        try:
            while token.next < len(self._links) and token.go_on():
                pass
        finally:
            self._forget(kwargs, token.next, len(token.rooms))
        if token.next > 1:
            self._made = kwargs, token.outputs[: token.next]
        return token.outputs[0] if token.next else None


def _same(kwargs: dict[str, Any], others: dict[str, Any]) -> bool:
    """Are two layers given the same besides hidden states?"""
    names = ("position_embeddings", "past_key_values", "attention_mask", "together")
    return all(kwargs.get(name) is others.get(name) for name in names)


class _Token:
    """A token on its way through the layers, which has come to number `next`; its `outputs`, and
    the `rooms` that it was given in the layers' caches."""

    def __init__(
        self, links: Sequence[Link], experts: Experts, x: Tensor, kwargs: dict[str, Any]
    ) -> None:
        self._links, self._experts, self._x, self._kwargs = links, experts, x, kwargs
        self.next, self.rooms = 0, list[Room]()
        self.outputs = [torch.empty_like(x) for _ in links]
        hidden = x.shape[-1]
        parts = torch.empty(len(links), 2, 1, hidden, dtype=x.dtype)
        self._between = [tuple(each.unbind()) for each in parts.unbind()]  # residual, router's x
        self._asked: list[Asked] = []  # of the layers that the last region began with

    def go_on(self) -> bool:
        """Go through the layers that come next, and through one that Python computes from its
        choice on. False where none can be."""
        first = self.next
        done = self._experts.several(first, self._region)
        if done is None or len(self.rooms) < len(self._links):
            return False
        self.next += done
        if self.next < len(self._links):
            residual, state = self._between[self.next]
            link, asked = self._links[self.next], self._asked[done]
            self.outputs[self.next] = link.from_choice(state, asked, residual).view(self._x.shape)
            self.next += 1
        return True

    def _region(self, tables: Sequence[Tables]) -> Sequence[int]:
        """How many experts each of the next layers computed, until one that did not."""
        if not self.rooms and not self._make_room():
            return []
        first, kept, entries, planned = self.next, list[object](), list[int](), list[Planned]()
        x = self.outputs[first - 1] if first else self._x
        positions, buffer = self._kwargs["position_embeddings"], self._experts.direct[first].room()
        self._asked.clear()
        for number, words in enumerate(tables, first):
            residual, state = self._between[number]
            stages, asked, memory = self._links[number].up_to_choice(
                x, positions, self.rooms[number], residual, state
            )
            x = self.outputs[number]
            for each, argument in stages:
                entries += (each.address, argument.buffer_info()[0])
            experts = self._experts.direct[number].planned(
                state.data_ptr(),
                asked.ids.data_ptr(),
                asked.weights.data_ptr(),
                residual.data_ptr(),
                x.data_ptr(),
                buffer,
                words,
            )
            entries += (0, asked.found, *experts.entries)
            self._asked.append(asked)
            planned.append(experts)
            kept += (stages, memory)
        region = array("q", (len(entries) // 2, BARRIER, *entries))
        body(layers.in_turn, torch.float32)(region.buffer_info()[0])
        found = [each.words[each.found] for each in planned]
        return found[: found.index(0)] if 0 in found else found

    def _make_room(self) -> bool:
        """Room for the token in every layer's cache; False where one has none."""
        cache = self._kwargs["past_key_values"]
        for link in self._links:
            room = link.room(cache)
            if room is None:
                return False
            self.rooms.append(room)
        return True
