"""A model's routers: the modules beside its experts that choose among them."""

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
    """The router of an MoE layer with `experts` experts, and the block that holds both."""

    module: nn.Module
    block: nn.Module
    experts: int

    def arguments(self) -> dict[str, Tensor]:
        """What the router takes beside hidden states, where that is the block's own.

        Some blocks keep a correction bias and hand it over in each call. PredictorError where the
        router asks for what only a pass can know, as token ids or another router's states.
        """
        found: dict[str, Tensor] = {}
        for parameter in list(inspect.signature(self._forward).parameters.values())[1:]:
            held = getattr(self.block, parameter.name, None)
            if isinstance(held, Tensor):
                found[parameter.name] = held
            elif parameter.default in (inspect.Parameter.empty, None):
                raise PredictorError(
                    f"{type(self.module).__name__} routes by {parameter.name} too, which is not"
                    " known ahead: it cannot be asked about another layer's hidden states"
                )
        return found

    @property
    def _forward(self) -> Any:
        return type(self.module).forward.__get__(self.module)

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Ask out of turn, past all hooks: [T, H] -> (scores of the experts [T, E], chosen [T, K]).

        Scores are what the router says of all experts (logits, or their softmax), or None.
        ValueError where what it returns is something else.
        """
        out, extra = None, self.arguments()
        for shape in ((len(hidden), -1), (1, len(hidden), -1)):  # some insist on a batch
            try:
                out = self._forward(hidden.reshape(shape), **extra)
                break
            except (ValueError, IndexError):
                if len(shape) == 3:
                    raise
        chosen, scores = _read(out, len(hidden))
        if scores is not None and scores.shape[1] >= self.experts:
            return scores[:, : self.experts], chosen
        return None, chosen


def _read(out: Any, tokens: int) -> tuple[Tensor, Tensor | None]:
    """(chosen, scores) of what a router returned: scores, weights and ids, then what it likes."""
    found = out[:3] if isinstance(out, tuple) else ()
    if len(found) < 3 or not all(isinstance(x, Tensor) for x in found):
        raise ValueError("it does not return scores, weights and ids")
    if out[2].is_floating_point() or out[2].numel() % tokens:
        raise ValueError("what it returns in the third place are no ids of experts")
    scores = out[0].reshape(tokens, -1) if out[0].numel() % tokens == 0 else None
    return out[2].reshape(tokens, -1), scores


def find_routers(model: nn.Module, layers: Sequence[str]) -> list[Router]:
    """The router of each experts module; `layers` are their names, in the model's order.

    A router is beside the experts it chooses from: in the MoE block, or where there is none on
    the decoder layer. PredictorError where there is no module `gate` or `router`.
    """
    found = []
    for name in layers:
        parent = name.rpartition(".")[0]
        block, experts = model.get_submodule(parent), model.get_submodule(name)
        beside = [m for n in NAMES if isinstance(m := getattr(block, n, None), nn.Module)]
        if not beside:
            raise PredictorError(f"{parent}: no router beside the experts: its choice is unseen")
        found.append(Router(beside[0], block, int(cast(int, experts.num_experts))))
    return found
