"""What a module does with what its parts give, found by running it on stand-ins for them.

A stand-in returns a random tensor and notes what it is given; the module's own code does the rest.
So a decoder layer of the common kind is known by its bits, whatever it and its parts are called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_SCALES = (1.0, 1e4)  # of all tensors: a clamp would show
Found = TypeVar("Found")
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # a part's name, and what it was called with


class _StandIn(nn.Module):
    """Notes its calls, and gives one answer."""

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
    """(what the module's class makes of its parts' answers, its calls); (None, []) if it cannot."""
    calls: list[Call] = []
    other = copy.copy(module)
    parts = {name: _StandIn(name, answer, calls) for name, answer in answers.items()}
    other.__dict__ = {**vars(module), "_modules": parts}
    try:
        return type(module).forward(other, x, **kwargs), calls
    except _ODD:
        return None, []


def _is(value: Any, wanted: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype is wanted.dtype and torch.equal(value, wanted)


def _only(call: Call) -> Any:
    """The argument of a call that has one."""
    _, args, kwargs = call
    return args[0] if len(args) == 1 and not kwargs else None


class _Draw:
    """Random tensors [1, 1, hidden] of a type."""

    def __init__(self, hidden: int, dtype: torch.dtype, scale: float) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._hidden, self._dtype, self._scale = hidden, dtype, scale

    def __call__(self) -> Tensor:
        x = torch.randn(1, 1, self._hidden, generator=self._random)
        return (x * self._scale).to(self._dtype)


def _agreed(find: Callable[[_Draw], Found], hidden: int, dtype: torch.dtype) -> Found | None:
    """What is found with tensors of every size, where it is the same."""
    found = {find(_Draw(hidden, dtype, scale)) for scale in _SCALES}
    return found.pop() if len(found) == 1 else None


def sublayers(
    layer: nn.Module, attention: str, norms: Collection[str], hidden: int, dtype: torch.dtype
) -> tuple[str, str, str] | None:
    """The names of a decoder layer's norms and of what follows the second, if it computes

        y = x + attention(norm(x)); y + block(other_norm(y))

    in its type, from parts among which the attention and those that are norms are known.
    """
    return _agreed(lambda draw: _sublayers(layer, attention, norms, draw), hidden, dtype)


def _sublayers(
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
    given, between_given, last = (_only(calls[place]) for place in (0, 2, 3))
    same = (
        _is(given, x)
        and (args[0] if len(args) == 1 else kwargs.get("hidden_states")) is drawn[first]
        and kwargs.get("position_embeddings") is positions
        and kwargs.get("past_key_values") is cache
        and kwargs.get("attention_mask") is None
        and _is(between_given, between)
        and last is drawn[second]
        and _is(out, between + drawn[block])
    )
    return (first, second, block) if same else None


def routed(
    block: nn.Module, experts: str, hidden: int, dtype: torch.dtype
) -> tuple[str, tuple[int, ...]] | None:
    """The name of a block's router and the shape of its input, if the block computes

        _, weights, index = router(x); experts(x, index, weights)

    and nothing besides.
    """
    return _agreed(lambda draw: _routed(block, experts, draw), hidden, dtype)


def _routed(block: nn.Module, experts: str, draw: _Draw) -> tuple[str, tuple[int, ...]] | None:
    x, result, answer = draw(), draw()[0], tuple(draw()[0, :, :2] for _ in range(2))
    index = torch.tensor([[1, 0]])
    answers: dict[str, Any] = dict.fromkeys(block._modules, (*answer, index))
    out, calls = _run(block, {**answers, experts: result}, x.clone(), {})
    if len(calls) != 2 or calls[1][0] != experts or calls[0][0] == experts:
        return None
    (router, *_), (_, args, kwargs) = calls
    given = _only(calls[0])
    same = (
        isinstance(given, Tensor)
        and _is(given.reshape(x.shape), x)
        and len(args) == 3
        and not kwargs
        and _is(args[0], x[0])
        and args[1] is index
        and args[2] is answer[1]
        and _is(out, result[None])
    )
    return (router, tuple(given.shape)) if same else None
