"""Decoder layers that follow one another, for one token in one parallel region.

Where every expert has a slot nothing is decided between two layers, and Python between them takes
as long as a tenth of the weights: so the first layer computes those that follow, and they find
their outputs made. Before, it is found out in a pass that each is given just what the one before it
returned. The bits are those of the layers one by one; where a choice is torch's (router.py), or an
expert has yet to come, the region is left at that layer and entered again behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer, Key
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.resident.launch_plan import LaunchPlan
from greenroom.runtime.slots.resident_tables import SlotTables

if TYPE_CHECKING:
    from greenroom.runtime.forward import FusedExperts

Forward = Callable[..., Any]
TakeBack = Callable[[Any, int], None]


def fuse_layers(
    model: nn.Module,
    layers: Mapping[nn.Module, FusedDecoderLayer],
    make_experts: Callable[[Sequence[Key]], FusedExperts | None],
    take_back: TakeBack,
) -> None:
    """Fuse the layers of a kind that stand side by side in a list of a model's.

    take_back: takes a layer's last token out of a cache again
    """

    def kind(layer: nn.Module) -> Any:
        return layers[layer].kind if layer in layers else None

    for each in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for alike, run in groupby(each, kind):
            links = [layers[layer] for layer in run] if alike is not None else []
            if len(links) > 1:
                keys = [key for link in links if (key := link.takes_part()) is not None]
                if (experts := make_experts(keys)) is not None:
                    FusedLayers(links, experts, take_back)


class _Pass(threading.local):
    """What a thread's pass has come to."""

    def __init__(self) -> None:
        self.before: tuple[int, Tensor, Tensor, dict[str, Any]] | None = None
        self.made: tuple[dict[str, Any], Sequence[Tensor]] | None = None  # that will be asked for
        self.plan: LaunchPlan | None = None


class FusedLayers:
    """Layers of one kind that may follow one another in a model: their forwards."""

    def __init__(
        self, links: Sequence[FusedDecoderLayer], experts: FusedExperts, take_back: TakeBack
    ) -> None:
        self._links, self._experts, self._take_back = tuple(links), experts, take_back
        self._in_order: bool | None = None  # not known yet
        self._guard: ModuleCheck | None = None
        self._pass = _Pass()
        for number, link in enumerate(links):
            link.replace_forward(self._forward(number, link.forward))

    def _forward(self, number: int, alone: Forward) -> Forward:
        """A layer's forward; `alone` computes it by itself."""

        @outside_graphs
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not args:
                out = self(number, hidden_states, kwargs)
                if out is not None:
                    return out
                if self._pass.before is not None:
                    return self._watched(number, alone, hidden_states, kwargs)
            return alone(hidden_states, *args, **kwargs)

        return forward

    def __call__(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Layer `number`'s output for x [1, 1, hidden]; None: it is to compute that by itself."""
        mine = self._pass
        if number == 0:
            return self._begin(x, kwargs)
        made, mine.made = mine.made, None
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

    def _begin(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Compute as many layers as can be; the first one's output."""
        mine = self._pass
        mine.before = mine.made = None
        if self._in_order is False or not self._experts.all_resident:
            return None
        if self._in_order is None:
            mine.before = -1, x, x, kwargs  # watch this pass
            return None
        if not self._intact() or not self._links[0].takes(x, kwargs):
            return None
        token = _Token(self._links, self._experts, mine, x, kwargs)
        try:
            while token.next < len(self._links) and token.go_on():
                pass
        finally:
            self._forget(kwargs, token.next, len(token.rooms))
        if token.next > 1:
            mine.made = kwargs, token.outputs[: token.next]
        return token.outputs[0] if token.next else None

    def _watched(self, number: int, alone: Forward, x: Tensor, kwargs: dict[str, Any]) -> Any:
        """The output of layer `number`, by itself: is its x the output of the layer before?"""
        before, self._pass.before = self._pass.before, None
        assert before is not None
        last, given, copy, others = before
        if last != number - 1 or not self._links[number].takes(x, kwargs):
            return alone(x, **kwargs)
        if x is not given or not torch.equal(x, copy) or not _same(kwargs, others):
            self._in_order = False
            return alone(x, **kwargs)
        out = alone(x, **kwargs)
        if number < len(self._links) - 1:
            self._pass.before = number, out, out.clone(), kwargs
        else:
            self._in_order = self._experts.layer_experts is not None
        return out

    def _intact(self) -> bool:
        """Are all layers what they were when this was first found so, and does nobody listen?"""
        if self._guard is None:
            guard = ModuleCheck()
            for link in self._links:
                guard.include(link.guard)
            if not guard.holds():
                return False
            self._guard = guard
        return self._guard.holds()

    def _forget(self, kwargs: dict[str, Any], first: int, end: int) -> None:
        """The layers from number `first` on have not seen this token."""
        for link in self._links[first:end]:
            self._take_back(kwargs["past_key_values"], link.one.module.layer_idx)


def _same(kwargs: dict[str, Any], others: dict[str, Any]) -> bool:
    """Are two layers given the same besides hidden states?"""
    names = ("position_embeddings", "past_key_values", "attention_mask", "batched_cache")
    return all(kwargs.get(name) is others.get(name) for name in names)


class _Token:
    """A token on its way through the layers, which has come to number `next`; its `outputs`, and
    the `rooms` that it was given in the layers' caches."""

    def __init__(
        self,
        links: Sequence[FusedDecoderLayer],
        experts: FusedExperts,
        state: _Pass,
        x: Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        self._links, self._experts, self._pass = links, experts, state
        self._x, self._kwargs = x, kwargs
        self.next, self.rooms = 0, list[KeyValueView]()
        self._used: LaunchPlan | None = None
        self._all = torch.empty(len(links), *x.shape, dtype=x.dtype)
        self.outputs = self._all.unbind()

    def go_on(self) -> bool:
        """Go through the layers that come next, and through one that Python computes from its
        choice on. False where none can be."""
        done = self._experts.resident_steps(self.next, self._region)
        if done is None or (plan := self._used) is None:
            return False
        self.next += done
        if self.next < len(self._links):
            # The plan's own memory is the next token's too.
            index, weights = (each.clone() for each in plan.asked[self.next].answer())
            link = self._links[self.next]
            out = link.from_choice(plan.state, index, weights, plan.residual)
            self.outputs[self.next].copy_(out.view(self._x.shape))
            self.next += 1
        return True

    def _region(self, tables: SlotTables) -> Sequence[int]:
        """How many experts each of the next layers computed, until one that did not."""
        if not self.rooms and not self._make_room():
            return []
        plan = self._plan()  # also where Python was between, and may have moved memory
        if plan is not self._used:
            plan.set(self._x, self._positions, self.rooms, self._all)
            self._used = plan
        return plan.run(self.next, tables)

    @property
    def _positions(self) -> Positions:
        positions: Positions = self._kwargs["position_embeddings"]
        return positions

    def _plan(self) -> LaunchPlan:
        """The last token's, where it fits this one."""
        known = self._pass.plan
        if known is None or not known.fits(self._positions, self.rooms):
            experts = self._experts
            assert experts.layer_experts is not None
            known = LaunchPlan(
                self._links,
                experts.layer_experts,
                experts.first_pieces,
                self._x,
                self._positions,
                self.rooms,
            )
            self._pass.plan = known
        return known

    def _make_room(self) -> bool:
        """Room for the token in every layer's cache; False where one has none."""
        cache = self._kwargs["past_key_values"]
        for link in self._links:
            room = link.one.room(cache)
            if room is None:
                return False
            self.rooms.append(room)
        return True
