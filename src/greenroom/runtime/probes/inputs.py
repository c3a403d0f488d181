"""The hidden states that enter a model's routers, kept as they pass by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.core.predictor import Inputs
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.probes.routers import Router


class GateInputProbe:
    """Listens at routers until `detach`; a layer's states are those of the pass under way."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._seen: list[Tensor | None] = [None] * len(routers)
        self._hooks = [
            router.module.register_forward_pre_hook(self._listener(layer), with_kwargs=True)
            for layer, router in enumerate(routers)
        ]

    def _listener(self, layer: int) -> Callable[..., None]:
        seen = self._seen

        @outside_graphs
        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[layer] = args[0] if args else kwargs["hidden_states"]

        return listen

    def raw(self, layer: int) -> Tensor:
        """What entered the layer's router last, [T, H] as it was; it is let go of here."""
        hidden, self._seen[layer] = self._seen[layer], None
        if hidden is None:
            raise ValueError(f"nothing has entered the router of layer {layer}")
        hidden = hidden.detach()
        return hidden.reshape(-1, hidden.shape[-1])

    def latest(self, layer: int) -> Inputs | None:
        """What predictors take, or None where the experts were called without their router."""
        return None if self._seen[layer] is None else self.take(layer)

    def take(self, layer: int) -> Inputs:
        """The same as predictors take it: float32, in NumPy."""
        values: Inputs = self.raw(layer).to("cpu", torch.float32).numpy()
        return values

    def detach(self) -> None:
        """Take the hooks out again; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen[:] = [None] * len(self._seen)
