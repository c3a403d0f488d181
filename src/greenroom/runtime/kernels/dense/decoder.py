"""A decoder layer of the common kind for the one token of a decode step, in two parallel regions.

The first goes from the hidden state over norm, attention and residual sum to the block's input; the
router chooses (router.py) in the first, where it is of a known kind; the second goes from the
experts to the layer's output. Where all experts of a token are in their slots nothing is computed
between: after a group of experts has gone through the caches each of its small operations takes as
long as a matrix. The bits are those of the accelerated modules called one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.codegen.entries import heads, layers
from greenroom.runtime.kernels.dense.attention import (
    KeyValueView,
    OneTokenAttention,
    Positions,
    Style,
)
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.patterns import routed
from greenroom.runtime.kernels.dense.router import CompiledRouter, RouterCall
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import bits

# (experts module, x [1, H], index, weights [1, K], residual) -> residual + the experts' result
Onto = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


# One of a layer's stages up to its choice, and an argument of it.
Place = tuple[int, int]


class Places(NamedTuple):
    """Where a layer's arguments are that change from token to token."""

    x: Sequence[Place]
    cos: Sequence[Place]
    sin: Sequence[Place]
    key: Sequence[Place]  # where the token's own goes
    value: Sequence[Place]
    tokens: Sequence[Place]


# An experts module, how many experts are chosen, and the type of their weights.
Key = tuple[nn.Module, int, torch.dtype]


class FusedDecoderLayer:
    """A decoder layer's compiled forward for one token, around that of its attention."""

    # Of the stages up to the choice: the first sum, projections, attention, the second sum.
    places = Places(
        x=((0, layers.N_X), (3, layers.N_X)),
        cos=((1, heads.COS),),
        sin=((1, heads.SIN),),
        key=((1, heads.K_OUT),),
        value=((1, heads.V_OUT),),
        tokens=((2, heads.CONTEXT),),
    )

    def __init__(
        self,
        layer: nn.Module,
        one: OneTokenAttention,
        names: tuple[str, str, str],
        styles: tuple[Style, Style],
        onto: Onto | None,
    ) -> None:
        """`names` are those of the norms and of the block that follows the second."""
        self._layer, self.one = layer, one
        parts: dict[str, Any] = dict(layer._modules)
        first, second, self._name = names
        self._block: nn.Module = parts[self._name]
        norms = parts[first], parts[second]
        self._parts = ModuleCheck()  # that norms, attention and block are still those
        for name in (first, second, self._attention(), self._name):
            self._parts.same(layer._modules, name, parts[name])
        for norm in norms:
            self._parts.weight(norm)
        for part in (*norms, one.module):
            self._parts.unheard(part)
        self._join = kernel_entry(layers.add_and_norm, one.dtype)
        self._begin, self._middle = (
            self._words(norm.weight, style) for norm, style in zip(norms, styles, strict=True)
        )
        self._onto = onto
        self._router, self._experts, self._shape = self._parts_of_block()
        self._plain = ModuleCheck()  # that the block is what it was, and nobody listens to it
        for part in (self._block, self._experts):
            if part is not None:
                self._plain.unheard(part)
                self._plain.same(vars(part), "forward", None)
        self.choice = self._chosen_fast()
        self.forward = layer_forward(self, layer)

    def _attention(self) -> str:
        return next(n for n, part in self._layer._modules.items() if part is self.one.module)

    def _words(self, weight: Tensor, style: Style) -> array[int]:
        words = array("q", [0] * layers.NORM_ARGUMENTS)
        words[layers.N_WEIGHT], words[layers.N_COLUMNS] = weight.data_ptr(), self.one.hidden
        words[layers.N_STYLE], words[layers.N_EPS] = style[0], bits(style[1])
        return words

    def _parts_of_block(self) -> tuple[str, nn.Module | None, tuple[int, ...]]:
        """(router, experts, shape of the router's input) of a block that has nothing else."""
        for name, part in self._block._modules.items():
            if hasattr(part, "num_experts") and hasattr(part, "_apply_gate"):
                found = routed(self._block, name, self.one.hidden, self.one.dtype)
                if found is not None:
                    return found[0], part, found[1]
        return "", None, ()

    def _chosen_fast(self) -> CompiledRouter | None:
        """The router, where its choice can be compiled."""
        if self._experts is None:
            return None
        return CompiledRouter.of(self._block._modules[self._router], self._shape, self.one.dtype)  # type: ignore[arg-type]

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids of the experts that x [T, hidden] goes to, their weights), [T, K] each."""
        if len(x) == 1 and self.choice is not None and self.choice.intact():
            return self.choice(x)
        given = x if len(self._shape) == 2 else x[None]
        _, weights, index = self._block._modules[self._router](given)  # type: ignore[misc]
        return index, weights

    def takes(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Is this call one that the compiled bodies know, of the parts that they know?"""
        return self._parts.holds() and self.one.takes(
            x,
            kwargs.get("position_embeddings"),
            kwargs.get("attention_mask"),
            kwargs.get("past_key_values"),
        )

    def __call__(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The layer's output for x [1, 1, hidden]; None, and nothing done, where the cache has no
        room for one more token."""
        room = self.one.room(kwargs["past_key_values"])
        if room is None:
            return None
        # Few of torch's operations: on cold caches an empty tensor or a view takes 10 microseconds.
        residual, state = (torch.empty(1, self.one.hidden, dtype=x.dtype) for _ in range(2))
        work = self.work(room.tokens)
        stages = self._stages(x, kwargs["position_embeddings"], room, residual, state, work)
        if self._experts is None or self._onto is None or not self._plain.holds():
            sequence.run(stages)
            return residual.view(x.shape) + self._block(state.view(x.shape))
        if self.choice is not None and self.choice.intact():
            asked = RouterCall(self.choice, state.data_ptr())
            sequence.run((*stages, *asked.stages))
            return self.from_choice(state, *asked.answer(), residual).view(x.shape)
        sequence.run(stages)
        index, weights = self._choose(state)
        return self._onto(self._experts, state, index, weights, residual).view(x.shape)

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Give the layer another forward, around the one that it has."""
        self.forward = self._layer.forward = forward

    @property
    def guard(self) -> ModuleCheck:
        """That the layer is what it is now, its forward too, and nobody listens to its parts."""
        assert self.choice is not None
        guard = ModuleCheck()
        guard.same(vars(self._layer), "forward", self.forward)
        for each in (self.choice.guard, self._plain, self._parts, self.one.guard):
            guard.include(each)
        return guard

    def takes_part(self) -> Key | None:
        """(experts module, how many are chosen, type of weights) where one region can do it all."""
        if self.choice is None or self._experts is None or self._onto is None:
            return None
        return self._experts, self.choice.top_k, self.choice.dtype

    @property
    def kind(self) -> tuple[Any, ...] | None:
        """Layers of one kind take the same calls; None of those that one region cannot do."""
        one = self.one
        kind = type(one.module), one.hidden, one.width, one.dtype
        return None if self.takes_part() is None else kind

    def work(self, tokens: int) -> Tensor:
        """Memory for the stages up to the choice with a context of so many tokens."""
        # Beside the attention's: two rows of the model's type.
        return self.one.work(tokens, beside=self.one.hidden)

    def up_to_choice(
        self,
        x: Tensor,
        positions: Positions,
        room: KeyValueView,
        residual: Tensor,
        state: Tensor,
        work: Tensor,
    ) -> tuple[Sequence[sequence.Stage], RouterCall]:
        """(stages to residual = x + attention and state = its norm [1, hidden] and to the choice
        of experts for that, the choice). All of it must live until they are done."""
        assert self.choice is not None
        stages = self._stages(x, positions, room, residual, state, work)
        asked = RouterCall(self.choice, state.data_ptr())
        return (*stages, *asked.stages), asked

    def from_choice(
        self, state: Tensor, index: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor:
        """The layer's output [1, hidden], from what these stages left and the choice."""
        assert self._experts is not None
        assert self._onto is not None
        return self._onto(self._experts, state, index, weights, residual)

    def tokens(self, x: Tensor, kwargs: dict[str, Any], batched_cache: Any) -> Tensor | None:
        """The layer's output for x [1, T, hidden], a token each of the T sequences of
        `batched_cache` (`hf.kv.batch.BatchedCache`), whose experts are one step; None, and nothing
        done, where a token is none that the compiled bodies know.

        Up to the router every token is computed as if it were alone, and experts are: with
        `exact` the rest is too.
        """
        positions = batched_cache.positions(kwargs["position_embeddings"])
        tokens = x.split(1, 1)
        first = {"position_embeddings": positions[0], "past_key_values": batched_cache.caches[0]}
        if not self.takes(tokens[0], {**kwargs, **first}):  # and so are the others
            return None
        rooms = [
            room for cache in batched_cache.caches if (room := self.one.room(cache)) is not None
        ]
        if len(rooms) < len(tokens):
            if rooms:
                raise AssertionError("caches of one batch are of one kind")
            return None
        total, state = torch.empty_like(x), torch.empty_like(x)
        works = [self.work(room.tokens) for room in rooms]
        rows = zip(
            tokens, positions, rooms, total.split(1, 1), state.split(1, 1), works, strict=True
        )
        self._run_rows([self._stages(*row) for row in rows])
        return self._after(total, state, batched_cache.exact)

    def _run_rows(self, rows: Sequence[Sequence[sequence.Stage]]) -> None:
        """The stages of several tokens, side by side."""
        begin, project, attend, middle = zip(*rows, strict=True)
        join, one = kernel_entry(layers.add_and_norm_rows, self.one.dtype), self.one
        work = torch.empty(4, len(rows), one.widest)
        sequence.run(
            (
                sequence.of_rows(join, [words for _, words in begin], work.data_ptr()),
                *one.stages_of_rows(list(zip(project, attend, strict=True)), work),
                sequence.of_rows(join, [words for _, words in middle]),
            )
        )

    def _after(self, total: Tensor, state: Tensor, exact: bool) -> Tensor:
        """total + what the block makes of state, [1, T, hidden]."""
        if self._experts is None or self._onto is None or not self._plain.holds():
            rows = state.split(1, 1) if exact else (state,)
            return total + torch.cat([self._block(row) for row in rows], 1)
        alone = exact or self.choice is not None  # a compiled choice is of one token
        chosen = [self._choose(row) for row in (state[0].split(1) if alone else (state[0],))]
        index, weights = (torch.cat(each) for each in zip(*chosen, strict=True))
        return self._onto(self._experts, state[0], index, weights, total[0]).view(state.shape)

    def _stages(
        self,
        x: Tensor,
        positions: Positions,
        room: KeyValueView,
        total: Tensor,
        out: Tensor,
        work: Tensor,
    ) -> tuple[sequence.Stage, ...]:
        """total = x + attention(norm(x)), out = its norm, by way of `work`."""
        one = self.one
        normed = work.data_ptr() + 4 * (work.numel() - one.hidden)
        attended = normed + one.hidden * x.itemsize
        begin, middle = array("q", self._begin), array("q", self._middle)
        begin[layers.N_X], begin[layers.N_OUT] = x.data_ptr(), normed
        middle[layers.N_X], middle[layers.N_Y] = begin[layers.N_X], attended
        middle[layers.N_SUM], middle[layers.N_OUT] = total.data_ptr(), out.data_ptr()
        stages = one.stages(normed, positions, room, work, attended)
        return (self._join, begin), *stages, (self._join, middle)


def layer_forward(one: FusedDecoderLayer, module: nn.Module) -> Callable[..., Any]:
    """A decoder layer's forward, compiled for one token."""
    original = type(module).forward

    @outside_graphs
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return original(module, hidden_states, *args, **kwargs)
        if one.takes(hidden_states, kwargs):
            out = one(hidden_states, kwargs)
            if out is not None:
                return out
        batched_cache = kwargs.get("batched_cache")
        if batched_cache is not None and batched_cache.one_token_each:
            out = one.tokens(hidden_states, kwargs, batched_cache)
            if out is not None:
                return out
        return original(module, hidden_states, **kwargs)

    return forward
