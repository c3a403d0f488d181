"""Detect how a module combines its submodules, by a run with stub submodules.

A stub returns a random tensor and records its inputs; the module's own code does the rest. So a
decoder layer of the common kind is recognised by the bits of its output, whatever the names of its
submodules are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

_SCALES = (1.0, 1e4)  # of all tensors; with the larger one a clamp would show
Result = TypeVar("Result")
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # a part's name, its arguments


class _StubModule(nn.Module):
    """A submodule that records its calls and returns a fixed answer."""

    def __init__(self, name: str, answer: Any, calls: list[Call]) -> None:
        super().__init__()
        self._name, self._answer, self._calls = name, answer, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._name, args, kwargs))
        return self._answer


@torch.no_grad()
def _run(
    module: nn.Module, answers: dict[str, Any], x: Tensor, kwargs: dict[str, Any]
) -> tuple[Any, list[Call]]:
    """Run a module with stubs; return (its output, the stubs' calls), or (None, []) if it fails.

    Submodules without an answer in `answers` stay as they are.
    """
    calls: list[Call] = []
    other = copy.copy(module)
    stubs = {name: _StubModule(name, answer, calls) for name, answer in answers.items()}
    other.__dict__ = {**vars(module), "_modules": {**module._modules, **stubs}}
    try:
        return type(module).forward(other, x, **kwargs), calls
    except _ODD:
        return None, []


def _equals(value: Any, expected: Tensor) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype is expected.dtype and torch.equal(value, expected)
    )


def _only_argument(call: Call) -> Any:
    """Return the argument of a call with one argument, else None."""
    _, args, kwargs = call
    return args[0] if len(args) == 1 and not kwargs else None


class _Draw:
    """A source of random tensors of one type."""

    def __init__(self, hidden: int, dtype: torch.dtype, scale: float) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._hidden, self._dtype, self._scale = hidden, dtype, scale

    def __call__(self, columns: int = 0) -> Tensor:
        """Return a random tensor [1, 1, columns]; the default is the hidden size."""
        x = torch.randn(1, 1, columns or self._hidden, generator=self._random)
        return (x * self._scale).to(self._dtype)


def _find_at_all_scales(
    find: Callable[[_Draw], Result], hidden: int, dtype: torch.dtype
) -> Result | None:
    """Return what `find` finds if it is the same for tensors of every scale."""
    results = {find(_Draw(hidden, dtype, scale)) for scale in _SCALES}
    return results.pop() if len(results) == 1 else None


def find_sublayers(
    layer: nn.Module, attention: str, norms: Collection[str], hidden: int, dtype: torch.dtype
) -> tuple[str, str, str] | None:
    """Find the names of a decoder layer's norms and MLP or MoE block.

    The layer must compute, in the dtype of its input x,

        y = x + attention(norm(x)); y + block(other_norm(y))

    `attention` is the name of the layer's attention, `norms` are the names of submodules that may
    be its norms. Return (first norm, second norm, block), or None if the layer computes
    anything else.
    """
    return _find_at_all_scales(
        lambda draw: _find_sublayers(layer, attention, norms, draw), hidden, dtype
    )


def _find_sublayers(
    layer: nn.Module, attention: str, norms: Collection[str], draw: _Draw
) -> tuple[str, str, str] | None:
    x, drawn = draw(), {name: draw() for name in layer._modules}
    positions, cache = (draw(), draw()), object()
    between = x + drawn[attention]
    out, calls = _run(
        layer,
        {**drawn, attention: (drawn[attention], None)},
        x.clone(),
        {
            "attention_mask": None,
            "position_ids": torch.zeros(1, 1, dtype=torch.int64),
            "past_key_values": cache,
            "use_cache": True,
            "position_embeddings": positions,
        },
    )
    if len(calls) != 4 or calls[1][0] != attention:
        return None
    (first, *_), (_, args, kwargs), (second, *_), (block, *_) = calls
    if not {first, second} <= set(norms) or block in {first, second, attention}:
        return None
    router_input, between_given, last = (_only_argument(calls[place]) for place in (0, 2, 3))
    same = (
        _equals(router_input, x)
        and (args[0] if len(args) == 1 else kwargs.get("hidden_states")) is drawn[first]
        and kwargs.get("position_embeddings") is positions
        and kwargs.get("past_key_values") is cache
        and kwargs.get("attention_mask") is None
        and _equals(between_given, between)
        and last is drawn[second]
        and _equals(out, between + drawn[block])
    )
    return (first, second, block) if same else None


class BlockParts(NamedTuple):
    """How an MoE block combines its parts.

    router: the name of its router
    shape:  the shape of the router's input for one token
    shared: the name of the part whose output is added to that of the experts; "" if there is none
    """

    router: str
    shape: tuple[int, ...]
    shared: str = ""


def find_block_parts(
    block: nn.Module, experts: str, hidden: int, dtype: torch.dtype
) -> BlockParts | None:
    """Find the router, and perhaps the shared expert, of an MoE block.

    The block must compute exactly

        _, weights, index = router(x); experts(x, index, weights)

    or experts(x, index, weights) + shared(x). `experts` is the name of its experts module. Return
    None if the block computes anything else.
    """
    return _find_at_all_scales(lambda draw: _find_block_parts(block, experts, draw), hidden, dtype)


def _find_block_parts(block: nn.Module, experts: str, draw: _Draw) -> BlockParts | None:
    x, result, added = draw(), draw()[0], draw()
    chosen = draw()[0, :, :2], draw()[0, :, :2], torch.tensor([[1, 0]])
    for router in block._modules.keys() - {experts}:
        answers: dict[str, Any] = {**dict.fromkeys(block._modules, added), router: chosen}
        out, calls = _run(block, {**answers, experts: result}, x.clone(), {})
        inputs = {name: (args, kwargs) for name, args, kwargs in calls}
        shared = [name for name in inputs if name not in (router, experts)]
        if len(calls) != len(inputs) or len(inputs) - len(shared) != 2 or len(shared) > 1:
            continue
        args, kwargs = inputs[experts]
        tensors = [_only_argument((name, *inputs[name])) for name in (router, *shared)]
        same = (
            all(isinstance(each, Tensor) and each.numel() == x.numel() for each in tensors)
            and all(_equals(each.view(x.shape), x) for each in tensors)
            and len(args) == 3
            and not kwargs
            and _equals(args[0], x[0])
            and args[1] is chosen[2]
            and args[2] is chosen[1]
            and _equals(out, result[None] + added if shared else result[None])
        )
        if same:
            return BlockParts(router, tuple(tensors[0].shape), "".join(shared))
    return None


def is_gated_mlp(
    module: nn.Module, linear: Sequence[str], shape: tuple[int, int], dtype: torch.dtype
) -> bool:
    """Check that a module computes exactly down(silu(gate(x)) * up(x)).

    linear: the names of its projections gate, up and down
    shape: of the gate's weight [inner, hidden]
    """
    return bool(
        _find_at_all_scales(
            lambda draw: _is_gated_mlp(module, linear, shape[0], draw), shape[1], dtype
        )
    )


def _is_gated_mlp(module: nn.Module, linear: Sequence[str], inner: int, draw: _Draw) -> bool:
    x, out, (gate, up) = draw(), draw(), (draw(inner), draw(inner))
    answers = dict(zip(linear, (gate, up, out), strict=True))
    result, calls = _run(module, answers, x.clone(), {})
    inputs = {call[0]: _only_argument(call) for call in calls}
    return (
        result is out
        and len(calls) == 3 == len(inputs)
        and all(_equals(inputs[name], x) for name in linear[:2])
        and _equals(inputs[linear[2]], silu(gate) * up)
    )
