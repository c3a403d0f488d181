"""Routers that choose the experts with the largest softmax scores, found by trial computations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.errors import PredictorError, UsageError
from greenroom.runtime.probes.routers import Router, find_routers, read_output

_TRIALS, _NEAR = 64, 2e-2
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True)
class SoftmaxFormula:
    """How a router of this kind makes gate weights from the scores of all experts.

    top_k:  experts of a token
    scored: the router's first output is the softmax, not the scores before it
    summed: the gate weights of a token are divided by their sum
    scale:  what they are multiplied by
    """

    top_k: int
    scored: bool
    summed: bool
    scale: float

    def scores(self, first: Tensor) -> Tensor:
        """Return the scores before the softmax, from the router's first output: float32."""
        return first.float().log() if self.scored else first.float()

    def weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the gate weights of a token's experts.

        scores [tokens, experts], experts [tokens, top_k] -> float32 [tokens, top_k]
        """
        each = scores.softmax(-1).gather(1, experts)
        return self.scale * (each / each.sum(-1, keepdim=True) if self.summed else each)


def find_formulas(model: nn.Module, layers: Sequence[str], option: str) -> list[SoftmaxFormula]:
    """Return the formula of each layer's router; UsageError if one is no softmax and top-k.

    layers: names of the experts modules
    option: the option that needs it
    """
    try:
        routers = find_routers(model, layers)
    except PredictorError as error:
        raise UsageError(f"{option} cannot be used with this model: {error}") from error
    by_kind: dict[Any, SoftmaxFormula | None] = {}
    for router in routers:
        key = _kind(router)
        if key not in by_kind:
            by_kind[key] = find_formula(router)
        if by_kind[key] is None:
            raise UsageError(
                f"{option} works with routers that choose the largest scores of a softmax over all"
                f" experts, and {type(router.module).__name__} of {type(model).__name__} does not:"
                " leave it out"
            )
    return [formula for router in routers if (formula := by_kind[_kind(router)]) is not None]


def _kind(router: Router) -> Any:
    """Return a key that is equal for routers with the same formula."""
    plain = (bool, int, float, str)
    values = tuple((k, v) for k, v in sorted(vars(router.module).items()) if isinstance(v, plain))
    return type(router.module), router.experts, values


@torch.no_grad()
def find_formula(router: Router) -> SoftmaxFormula | None:
    """Find a router's formula by its outputs for random weights and inputs; None if none fits.

    The router may be on the meta device.
    """
    module = with_random_weights(router.module)
    matrix = next((p for p in module.parameters() if p.dim() == 2), None)
    if matrix is None:
        return None
    random = torch.Generator().manual_seed(1)
    x = torch.randn(_TRIALS, matrix.shape[1], generator=random).to(matrix.dtype)
    try:
        out = type(module).forward(module, x)
        chosen, first = read_output(out, len(x))
    except _ODD:
        return None
    if first is None or first.shape[1] != router.experts:
        return None
    gate_weights, total = out[1].reshape(chosen.shape).float(), first.float().sum(1)
    scored = bool(((total - 1).abs() < 1e-2).all() and (first >= 0).all())
    for summed in (False, True):
        plain = SoftmaxFormula(chosen.shape[1], scored, summed, 1.0)
        scores = plain.scores(first)
        best = scores.topk(chosen.shape[1]).values
        if not torch.equal(scores.gather(1, chosen).sort(descending=True).values, best):
            return None
        ratio = gate_weights / plain.weights(scores, chosen)
        scale = float(ratio.median())
        if bool(((ratio / scale - 1).abs() < _NEAR).all()) and scale > 0:
            exact = 1.0 if abs(scale - 1) < _NEAR else scale
            return SoftmaxFormula(chosen.shape[1], scored, summed, exact)
    return None


def with_random_weights(module: nn.Module) -> Any:
    """Return a copy of a router on the CPU with random weights, without hooks."""
    other: Any = copy.copy(module)
    random = torch.Generator().manual_seed(0)
    for name in ("_parameters", "_buffers"):
        tensors = {}
        for key, value in getattr(module, name).items():
            if value is not None:
                scale = 2 * value.shape[-1] ** -0.5 if value.dim() == 2 else 0.1
                drawn = torch.randn(value.shape, generator=random) * scale
                drawn = drawn.to(value.dtype)
                value = nn.Parameter(drawn, False) if name == "_parameters" else drawn
            tensors[key] = value
        other.__dict__[name] = tensors
    return other
