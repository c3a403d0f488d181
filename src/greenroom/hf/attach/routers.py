"""Routers whose choice of experts the scheduler's options change, while tokens are decoded.

Such an option overrides `core.plan.Option.choose`. Without one, no router is touched.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from greenroom.core.layout import Catalog
from greenroom.core.plan import overrides
from greenroom.errors import UsageError
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.probes.routers import Router, find_routers
from greenroom.runtime.probes.softmax import SoftmaxFormula, find_formulas


def check_bias(model: PreTrainedModel, catalog: Catalog, variants: bool) -> None:
    """Check that `--cache-bias` can change a model's routers, before the model is loaded.

    variants: tokens may belong to several variants of the model (`--adapter`)

    Raises UsageError if it cannot.
    """
    if variants:
        raise UsageError(
            "--cache-bias cannot be used where requests choose between adapters: leave out one of"
            " them"
        )
    fewest = min(each.top_k for each in find_formulas(model, catalog.layers, "--cache-bias"))
    if fewest <= 2:
        raise UsageError(
            f"--cache-bias leaves a token's two likeliest experts as they are, and"
            f" {type(model).__name__} uses {fewest} a token: leave it out"
        )


class ChangedRouters:
    """Forwards of a model's routers that let scheduler options change their choice.

    Create the object before compiled layers are installed: a router with a forward of its own is
    not compiled into its layer.
    """

    def __init__(self, model: PreTrainedModel, catalog: Catalog, driver: Driver) -> None:
        self._driver, self._lock = driver, threading.Lock()
        options = driver.scheduler.options
        self._choosers = [each.choose for each in options if overrides(each, "choose")]
        self._routers: Sequence[Router] = ()
        if self._choosers:
            self._routers = find_routers(model, catalog.layers)
            for layer, formula in enumerate(find_formulas(model, catalog.layers, "--cache-bias")):
                module: Any = self._routers[layer].module
                module.forward = partial(self._forward, layer, formula)

    def detach(self) -> None:
        """Restore the routers' own forwards; a second call does nothing."""
        for router in self._routers:
            router.module.__dict__.pop("forward", None)
        self._routers = ()

    @outside_graphs
    def _forward(self, layer: int, formula: SoftmaxFormula, *args: Any, **kwargs: Any) -> Any:
        """Compute a router's forward; while decoding, with the experts that the options choose."""
        module = self._routers[layer].module
        out = type(module).forward(module, *args, **kwargs)
        if self._driver.passes.prefill or out[0].is_meta:
            return out
        first, weights, index, *more = out
        scores = formula.scores(first.detach().reshape(-1, first.shape[-1]))
        chosen = index.reshape(-1, formula.top_k)
        before = experts = chosen.cpu().numpy().astype(np.int64, copy=False)
        on_host, view = scores.cpu().numpy(), self._driver.scheduler.view
        for choose in self._choosers:
            experts = choose(layer, on_host, experts, view)
        if experts is before:
            return out
        self._count(before, experts)
        ids = torch.from_numpy(experts).to(index.device)
        changed = (ids != chosen).any(1, keepdim=True)
        new = formula.weights(scores, ids).to(weights.dtype)
        gate_weights = torch.where(changed, new, weights.reshape(new.shape))
        return first, gate_weights.view(weights.shape), ids.to(index.dtype).view(index.shape), *more

    def _count(self, before: np.ndarray, after: np.ndarray) -> None:
        """Count the experts that some token uses though its router has not chosen them."""
        added = (after[:, :, None] != before[:, None, :]).all(2)
        with self._lock:
            self._driver.scheduler.view.count_rerouted(np.unique(after[added]).size)
