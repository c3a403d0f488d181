"""Detect how a module combines its submodules, by a run with stub submodules.

A stub returns a random tensor and records its inputs; the module's own code does the rest. So a
decoder layer of the common kind is recognised by the bits of its output, whatever the names of its
submodules are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
    """Run a module with stubs; return (its output, the stubs' calls), or (None, []) if it fails."""
    calls: list[Call] = []
    other = copy.copy(module)
    parts = {name: _StubModule(name, answer, calls) for name, answer in answers.items()}
    other.__dict__ = {**vars(module), "_modules": parts}
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
    """A source of random tensors [1, 1, hidden] of one type."""

    def __init__(self, hidden: int, dtype: torch.dtype, scale: float) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._hidden, self._dtype, self._scale = hidden, dtype, scale

    def __call__(self) -> Tensor:
        x = torch.randn(1, 1, self._hidden, generator=self._random)
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


def find_router(
    block: nn.Module, experts: str, hidden: int, dtype: torch.dtype
) -> tuple[str, tuple[int, ...]] | None:
    """Find the name of an MoE block's router and the shape of the router's input.

    The block must compute exactly

        _, weights, index = router(x); experts(x, index, weights)

    `experts` is the name of its experts module. Return None if the block computes anything else.
    """
    return _find_at_all_scales(lambda draw: _find_router(block, experts, draw), hidden, dtype)


def _find_router(block: nn.Module, experts: str, draw: _Draw) -> tuple[str, tuple[int, ...]] | None:
    x, result, answer = draw(), draw()[0], tuple(draw()[0, :, :2] for _ in range(2))
    index = torch.tensor([[1, 0]])
    answers: dict[str, Any] = dict.fromkeys(block._modules, (*answer, index))
    out, calls = _run(block, {**answers, experts: result}, x.clone(), {})
    if len(calls) != 2 or calls[1][0] != experts or calls[0][0] == experts:
        return None
    (router, *_), (_, args, kwargs) = calls
    router_input = _only_argument(calls[0])
    same = (
        isinstance(router_input, Tensor)
        and _equals(router_input.reshape(x.shape), x)
        and len(args) == 3
        and not kwargs
        and _equals(args[0], x[0])
        and args[1] is index
        and args[2] is answer[1]
        and _equals(out, result[None])
    )
    return (router, tuple(router_input.shape)) if same else None
