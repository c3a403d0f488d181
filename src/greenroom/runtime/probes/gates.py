"""A model's routers, asked out of turn (`core.predictor.Gates`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from greenroom.core.predictor import Ids, Inputs
from greenroom.core.ranking import top
from greenroom.errors import PredictorError
from greenroom.runtime.probes.linear import Linear, find_linear, random_inputs
from greenroom.runtime.probes.routers import Router


class RouterGates:
    """Ranks experts as the routers do: linear ones by a compiled product, others by themselves.

    PredictorError where a router cannot be asked out of turn.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._linear: list[Linear | None] = [_tried(router) for router in routers]

    @property
    def compiled(self) -> int:
        """How many of the routers are one product."""
        return sum(linear is not None for linear in self._linear)

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """[T, H] -> [T, width], likeliest first; -1 where a router names fewer."""
        if (linear := self._linear[layer]) is not None:
            ranked: Ids = top(linear.scores(inputs), width)
            return ranked
        return _by_itself(self._routers[layer], inputs, width)


def _tried(router: Router) -> Linear | None:
    """What the router computes; where that is no formula, PredictorError if it does not answer."""
    router.arguments()
    linear = find_linear(router)
    if linear is None:
        _answer(router)
    return linear


def _answer(router: Router) -> Ids:
    """What a router chooses for random inputs, [T, K]. PredictorError where it does not answer."""
    router.arguments()
    matrix = next((p for p in router.module.parameters() if p.dim() == 2), None)
    kind = type(router.module).__name__
    if matrix is None:
        raise PredictorError(f"{kind} has no matrix: what it is asked with is not known")
    hidden = torch.from_numpy(random_inputs(matrix.shape[1])).to(matrix.device, matrix.dtype)
    try:
        chosen: Ids = router(hidden)[1].cpu().numpy()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PredictorError(f"{kind} cannot be asked out of turn: {reason}") from error
    return chosen


def top_k_of(router: Router) -> int:
    """How many experts a router chooses for a token. PredictorError where it does not answer."""
    return int(_answer(router).shape[1])


def _by_itself(router: Router, inputs: Inputs, width: int) -> Ids:
    """What the router chooses, then what it scored highest of the rest."""
    own = next((p for p in router.module.parameters() if p.is_floating_point()), None)
    hidden = torch.from_numpy(inputs)
    if own is not None:
        hidden = hidden.to(own.device, own.dtype)
    scores, chosen = router(hidden)
    if scores is None:
        found = chosen[:, :width].cpu().numpy().astype(np.int64)
        return np.pad(found, ((0, 0), (0, width - found.shape[1])), constant_values=-1)
    order = torch.argsort(scores.float(), dim=1, descending=True, stable=True)
    others = torch.ones_like(scores, dtype=torch.uint8).scatter_(1, chosen, 0)
    first = torch.argsort(others.gather(1, order), dim=1, stable=True)
    ranked: Ids = order.gather(1, first)[:, :width].cpu().numpy()
    return ranked
