"""Baselines of the tier: transformers with all experts on the GPU, and plain copies.

`Stock` gives every layer transformers' own stacked weights. `Copies` keeps the first experts of a
layer on the GPU and copies every other one from pinned memory when a step needs it, one after
another on the stream that computes: what a few lines of PyTorch do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

COPIES = "gpu_report_copies"  # an experts implementation
NAMES = ("gate_up_proj", "down_proj")


@dataclass
class Experts:
    """A layer's experts: [E, 2I, H] and [E, H, I], in pinned memory and on the device."""

    host: tuple[Tensor, Tensor]
    device: tuple[Tensor, Tensor]  # of the first experts, or of all

    @classmethod
    def read(cls, tensors: dict[str, Tensor], experts: int, device: torch.device) -> Experts:
        """Stack a layer's expert tensors, given by their names after `mlp.experts.`."""
        ups = [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]])
               for e in range(experts)]  # fmt: skip
        downs = [tensors[f"{e}.down_proj.weight"] for e in range(experts)]
        host = torch.stack(ups), torch.stack(downs)
        if device.type == "cuda":
            host = host[0].pin_memory(), host[1].pin_memory()
        return cls(host, (host[0].to(device), host[1].to(device)))


@contextmanager
def stock(model: Any, names: tuple[str, ...], experts: Experts, kind: str) -> Iterator[None]:
    """Context in which transformers' experts implementation `kind` computes the model."""
    with computed_by(model, kind):
        modules = [model.get_submodule(name) for name in names]
        for module in modules:
            for name, tensor in zip(NAMES, experts.device, strict=True):
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        try:
            yield
        finally:
            for module in modules:
                for name in NAMES:
                    module.register_parameter(name, None)


@contextmanager
def copies(
    model: Any, names: tuple[str, ...], experts: Experts, resident: int
) -> Iterator[dict[str, int]]:
    """Context with `resident` experts of a layer on the device; copies of others are counted."""
    counts = {"requests": 0, "copied": 0}

    def forward(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = index.unique().tolist()
        counts["requests"] += len(chosen)
        for expert in chosen:
            if expert < resident:
                up, down = (tensor[expert] for tensor in experts.device)
            else:
                counts["copied"] += 1
                up, down = (t[expert].to(x.device, non_blocking=True) for t in experts.host)
            tokens, rank = (index == expert).nonzero(as_tuple=True)
            gate, h = linear(x[tokens], up).chunk(2, -1)
            h = linear(silu(gate) * h, down)
            out.index_add_(0, tokens, h * weights[tokens, rank, None])
        return out

    ALL_EXPERTS_FUNCTIONS.register(COPIES, forward)
    with computed_by(model, COPIES):
        yield counts


@contextmanager
def computed_by(model: Any, implementation: str) -> Iterator[None]:
    """Context in which another experts implementation computes the model."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._experts_implementation for key, config in configs.items()}
    for config in configs.values():
        config._experts_implementation = implementation
    try:
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
