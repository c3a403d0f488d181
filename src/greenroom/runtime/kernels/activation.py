"""Detect a module's activation function by its values on sample inputs, never by its name.

This file has the formulas of the compiled kernels as tensor operations. If one of them equals the
module's own activation bit for bit on random and extreme inputs, the kernels compute that formula.
Otherwise the module's function is called between the two projections of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import silu

from greenroom.runtime.kernels.layer import LayerExperts

# Numbers of the formulas (`Formula` in native/activations.hpp). RAW stands for a call of the
# module's own function.
RAW, SILU, SILU_FLOAT, CLAMPED, RELU2 = range(5)


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function that the expert kernels can compute, with its constants.

    code:  number of the formula; RAW stands for a call of the module's own function
    limit: bound to which gate and up projections are clamped
    alpha: factor of the gate within the sigmoid of the clamped formula
    """

    code: int = RAW
    limit: float = inf
    alpha: float = 1.0


def _silu(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate.clamp(max=a.limit)) * up.clamp(-a.limit, a.limit)


def _silu_float(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return (silu(gate.float()) * up.float()).to(gate.dtype)


def _clamped(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * a.alpha))


def _relu2(a: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return torch.square(torch.relu(up))


FORMULAS: dict[int, Callable[[Activation, Tensor, Tensor], Tensor]] = {
    SILU: _silu,
    SILU_FLOAT: _silu_float,
    CLAMPED: _clamped,
    RELU2: _relu2,
}


def _candidates(layer: LayerExperts) -> Iterator[Activation]:
    """Yield formulas with the constants that the module has as plain attributes."""
    if not layer.has_gate:
        yield Activation(RELU2)
        return
    attributes = vars(layer.module).values()
    numbers = sorted({float(v) for v in attributes if type(v) in (int, float) and 0 < v < inf})
    yield Activation(SILU)
    yield Activation(SILU_FLOAT)
    for limit in numbers:
        yield Activation(SILU, limit)
    for limit in [inf, *numbers]:
        for alpha in [1.0, *numbers]:
            yield Activation(CLAMPED, limit, alpha)


def _samples(layer: LayerExperts, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gate, up, both in the module's layout), each [48, 64 or 128]."""
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 0.5, 1.0, 4.0, 30.0, 1000.0]).repeat_interleave(8)[:, None]
    gate, up = ((torch.randn(48, 64, generator=random) * scale).to(dtype) for _ in range(2))
    up = up.flip(0)
    if not layer.has_gate:
        return gate, up, up
    if layer.interleaved:
        return gate, up, torch.stack((gate, up), -1).flatten(1)
    return gate, up, torch.cat((gate, up), -1)


@torch.no_grad()
def find_activation(layer: LayerExperts) -> Activation:
    """Find the compiled formula that equals a module's activation function bit by bit on samples.

    Return `Activation()`, which stands for a call of the module's own function, if no formula does.
    """
    if layer.recipe.compute is not None:  # the compiled formulas round to the layer's own type
        return Activation()
    gate, up, both = _samples(layer, layer.dtype)
    expected = layer.activate(both)
    for candidate in _candidates(layer):
        if torch.equal(FORMULAS[candidate.code](candidate, gate, up), expected):
            return candidate
    return Activation()
