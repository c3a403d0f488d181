"""Calls of a model's MoE routers outside of a forward pass, for expert predictors.

`RouterGates` implements the protocol `core.predictor.Gates`.
"""

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
    """Ranks experts for hidden states by a model's own MoE routers.

    A router with linear scores is computed by a compiled matrix product, another router by calling
    it. Raises PredictorError if a router cannot be called outside of a forward pass.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._linear: list[Linear | None] = [_checked_linear(router) for router in routers]

    @property
    def compiled(self) -> int:
        """Number of a model's routers that are computed by a compiled matrix product."""
        return sum(linear is not None for linear in self._linear)

    def rank(self, layer: int, inputs: Inputs, width: int) -> Ids:
        """Rank a layer's experts for hidden states by the layer's router, likeliest first.

        [tokens, hidden] -> [tokens, width]. Rows are filled with -1 if the router returns no scores
        and chooses fewer than `width` experts.
        """
        if (linear := self._linear[layer]) is not None:
            ranked: Ids = top(linear.scores(inputs), width)
            return ranked
        return _rank_by_router(self._routers[layer], inputs, width)


def _checked_linear(router: Router) -> Linear | None:
    """Return a linear formula of a router's scores; None if no formula fits.

    Raises PredictorError if the router cannot be called outside of a forward pass.
    """
    router.arguments()
    linear = find_linear(router)
    if linear is None:
        _choose(router)
    return linear


def _choose(router: Router) -> Ids:
    """Return the experts that a router chooses for random inputs: [tokens, top_k].

    Raises PredictorError if the router cannot be called outside of a forward pass.
    """
    router.arguments()
    matrix = next((p for p in router.module.parameters() if p.dim() == 2), None)
    kind = type(router.module).__name__
    if matrix is None:
        raise PredictorError(
            f"router {kind} has no matrix, so the size of its inputs is unknown: experts cannot be"
            " predicted from this router"
        )
    hidden = torch.from_numpy(random_inputs(matrix.shape[1])).to(matrix.device, matrix.dtype)
    try:
        chosen: Ids = router(hidden)[1].cpu().numpy()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PredictorError(
            f"router {kind} cannot be called outside of a forward pass: {reason}"
        ) from error
    return chosen


def top_k_of(router: Router) -> int:
    """Return the number of experts that a router chooses for each token.

    The router is called with random inputs. Raises PredictorError if the call fails.
    """
    return int(_choose(router).shape[1])


def _rank_by_router(router: Router, inputs: Inputs, width: int) -> Ids:
    """Rank the experts that a router chooses first, then the others by its scores.

    A choice beyond the experts is none of them: LongCat-Flash's identity.
    """
    parameter = next((p for p in router.module.parameters() if p.is_floating_point()), None)
    hidden = torch.from_numpy(inputs)
    if parameter is not None:
        hidden = hidden.to(parameter.device, parameter.dtype)
    scores, chosen = router(hidden)
    if scores is None:
        chosen = chosen.where(chosen < router.experts, -1)
        ids = chosen[:, :width].cpu().numpy().astype(np.int64)
        return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)
    order = torch.argsort(scores.float(), dim=1, descending=True, stable=True)
    columns = max(scores.shape[1], int(chosen.max()) + 1)
    others = scores.new_ones((len(scores), columns), dtype=torch.uint8).scatter_(1, chosen, 0)
    first = torch.argsort(others.gather(1, order), dim=1, stable=True)
    ranked: Ids = order.gather(1, first)[:, :width].cpu().numpy()
    return ranked
