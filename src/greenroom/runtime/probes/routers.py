"""Search for a model's routers, the modules that choose experts for each token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from greenroom.errors import PredictorError

NAMES = ("gate", "router")


@dataclass(frozen=True, slots=True)
class Router:
    """The router module of an MoE layer with `experts` experts, and its parent module."""

    module: nn.Module
    block: nn.Module
    experts: int

    def arguments(self) -> dict[str, Tensor]:
        """Return a router's arguments besides hidden states, taken from its parent module.

        Some MoE blocks own a correction bias and pass it to their router in each call. Raises
        PredictorError if the router needs an argument that only a forward pass has, such as token
        ids.
        """
        arguments: dict[str, Tensor] = {}
        for parameter in list(inspect.signature(self._forward).parameters.values())[1:]:
            value = getattr(self.block, parameter.name, None)
            if isinstance(value, Tensor):
                arguments[parameter.name] = value
            elif parameter.default in (inspect.Parameter.empty, None):
                raise PredictorError(
                    f"{type(self.module).__name__} also routes by {parameter.name}, which only a"
                    " forward pass has: this router cannot predict experts for later layers"
                )
        return arguments

    @property
    def _forward(self) -> Any:
        return type(self.module).forward.__get__(self.module)

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Call an MoE router without its hooks; return scores and chosen experts.

        [tokens, hidden] -> (scores [tokens, experts], chosen [tokens, top_k]). Scores are the
        router's logits or their softmax, or None if it does not return a score for each expert.
        Raises ValueError if the result does not begin with (scores, weights, expert ids).
        """
        out, extra = None, self.arguments()
        for shape in ((len(hidden), -1), (1, len(hidden), -1)):  # some need a batch dimension
            try:
                out = self._forward(hidden.reshape(shape), **extra)
                break
            except (ValueError, IndexError):
                if len(shape) == 3:
                    raise
        chosen, scores = read_output(out, len(hidden))
        if scores is not None and scores.shape[1] >= self.experts:
            return scores[:, : self.experts], chosen
        return None, chosen


def read_output(out: Any, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Extract (expert ids, scores) from a router's result (scores, weights, ids, ...).

    Scores are None if there is not the same number for each token.
    """
    tensors = out[:3] if isinstance(out, tuple) else ()
    if len(tensors) < 3 or not all(isinstance(x, Tensor) for x in tensors):
        raise ValueError("the router does not return scores, weights and ids of experts")
    if out[2].is_floating_point() or out[2].numel() % tokens:
        raise ValueError("the router's third result does not contain ids of experts")
    scores = out[0].reshape(tokens, -1) if out[0].numel() % tokens == 0 else None
    return out[2].reshape(tokens, -1), scores


def find_routers(model: nn.Module, layers: Sequence[str]) -> list[Router]:
    """Find the router that belongs to each experts module of a model.

    `layers` are the names of the experts modules, in the model's order. A router has the same
    parent as its experts: the MoE block, or the decoder layer. Raises PredictorError if a parent
    has no module `gate` or `router`.
    """
    routers = []
    for name in layers:
        parent = name.rpartition(".")[0]
        block, experts = model.get_submodule(parent), model.get_submodule(name)
        candidates = [m for n in NAMES if isinstance(m := getattr(block, n, None), nn.Module)]
        if not candidates:
            raise PredictorError(
                f"module {parent} has experts, but no module `gate` or `router`: experts cannot be"
                " predicted from routers"
            )
        routers.append(Router(candidates[0], block, int(cast(int, experts.num_experts))))
    return routers
