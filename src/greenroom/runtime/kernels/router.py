"""A router of the common kind for one token: torch's scores, and a compiled choice among them.

    softmax of x @ w.T in float32, the top k of it, perhaps over their sum, cast

Which experts are chosen, and with which weights, stays torch's bit for bit: the product and the
softmax are torch's own, what is compiled only selects, adds in the same order, divides and rounds.
That a router is of this kind is found by trying it.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from greenroom.runtime.kernels import choice
from greenroom.runtime.kernels.openmp import body

_TRIALS = 48
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)


class Router:
    """One router's choice for one token; `of` says whether it is of this kind."""

    def __init__(self, module: nn.Module, top_k: int, summed: bool, dtype: torch.dtype) -> None:
        """`summed`: are weights, which have this type, divided by their sum?"""
        self._module, self._top_k, self._summed, self._dtype = module, top_k, summed, dtype
        self._weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        self._enter = body(choice.select, dtype)
        room = -(-(top_k + 1) * 3 // 2)  # words of ids and of float32
        self._words = array("q", [0] * (choice.S_BEST + room + 1))
        self._words[choice.S_NUMBER], self._words[choice.S_TOP_K] = len(self._weight), top_k
        self._words[choice.SUMMED] = int(summed)

    @staticmethod
    def of(module: nn.Module, hidden: int, dtype: torch.dtype) -> Router | None:
        """One for a router of x [1, hidden] in `dtype`, or None."""
        weight = module._parameters.get("weight")
        parts = len(module._parameters), len(module._buffers), len(module._modules)
        if parts != (1, 0, 0) or weight is None or weight.dtype is not dtype:
            return None
        if weight.dim() != 2 or weight.shape[1] != hidden or weight.device.type != "cpu":
            return None
        return _tried(module, hidden, dtype)

    def intact(self) -> bool:
        """Is the module still what it was, and does nobody listen to it?"""
        module = self._module
        return not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._parameters["weight"] is not self._weight
            or "forward" in module.__dict__
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [1, top_k] of the experts that x [1, hidden] goes to, their weights)."""
        scores = linear(x, self._weight).softmax(-1, dtype=torch.float32)
        ids = torch.empty(1, self._top_k, dtype=torch.int64)
        weights = torch.empty(1, self._top_k, dtype=self._dtype)
        words = array("q", self._words)
        words[choice.SCORES], words[choice.S_IDS] = scores.data_ptr(), ids.data_ptr()
        words[choice.S_WEIGHTS] = weights.data_ptr()
        self._enter(words.buffer_info()[0], False)
        return (ids, weights) if words[choice.S_FOUND] else self._by_torch(scores)

    def _by_torch(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = scores.topk(self._top_k, dim=-1)
        if self._summed:
            values = values / values.sum(-1, keepdim=True)
        return ids, values.to(self._dtype)


@torch.no_grad()
def _tried(module: nn.Module, hidden: int, dtype: torch.dtype) -> Router | None:
    """The router that gives the module's own answers, on small inputs and on large ones."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(_TRIALS, 1, hidden, generator=random)
    inputs = (inputs * torch.logspace(-1, 1.5, _TRIALS)[:, None, None]).to(dtype)
    try:
        answers = [_answer(module(x)) for x in inputs]
    except _ODD:
        return None
    if not all(answers):
        return None
    ids, weights = answers[0]  # type: ignore[misc]
    for summed in (True, False):
        made = Router(module, ids.shape[1], summed, weights.dtype)
        pairs = zip((made(x) for x in inputs), answers, strict=True)
        if all(_same(mine, answer) for mine, answer in pairs):
            return made
    return None


def _answer(out: Any) -> tuple[Tensor, Tensor] | None:
    """(ids, weights) of what a router returns, where it is of that form."""
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(t, Tensor) for t in out)):
        return None
    _, weights, ids = out
    floats = weights.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if ids.dtype is not torch.int64 or not floats or ids.shape != weights.shape:
        return None
    return (ids, weights) if ids.dim() == 2 and len(ids) == 1 else None


def _same(mine: tuple[Tensor, Tensor], wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
