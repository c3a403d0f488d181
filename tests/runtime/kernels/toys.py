"""Experts modules of real architectures, tiny and random, and slots that hold their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import SlotLayout, TensorSpec
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.block_fields import join, separate

HIDDEN, INNER, EXPERTS = 88, 200, 6  # no multiples of a vector or of a tile: tails everywhere

# Every flag combination and every arithmetic that transformers has, by a class that has it.
CLASSES = {
    "qwen3_moe": "Qwen3MoeExperts",
    "mixtral": "MixtralExperts",
    "granitemoe": "GraniteMoeExperts",
    "phimoe": "PhimoeExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "gemma4": "Gemma4TextExperts",  # gelu
    "beam": "BeamExperts",  # activation in float32
    "hy_v4": "HYV4Experts",  # clamped swiglu
    "gpt_oss": "GptOssExperts",  # transposed, interleaved, biases
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",  # the same in float32 throughout
    "minimax_m3_vl": "MiniMaxM3VLExperts",  # gpt-oss's activation, concatenated
    "aria": "AriaExperts",  # transposed
    "nemotron_h": "NemotronHExperts",  # no gate, sum in the weights' type
    "muse_spark": "MuseSparkExperts",  # norm after each expert
    "inkling2": "Inkling2Experts",  # sum in float32
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Config(SimpleNamespace):
    """Stands in for any architecture's config: sizes under all their names."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if "experts" in name:
            return EXPERTS
        if "latent" in name:
            return None
        if "intermediate" in name:
            return self.inner
        if name.endswith("hidden_size"):
            return self.hidden
        if "act" in name:
            return self.activation
        return {"swiglu_limit": 3.0, "swiglu_alpha": 1.702, "post_norm_eps": 1e-6}.get(name, 2.0)


ACTIVATIONS = {"gemma4": "gelu_pytorch_tanh", "nemotron_h": "relu2"}


def experts(
    family: str, dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER, seed: int = 0
) -> nn.Module:
    """An experts module of a family with random weights of a trained model's size."""
    source = import_module(f"transformers.models.{family}.modeling_{family}")
    config = Config(hidden=hidden, inner=inner, activation=ACTIVATIONS.get(family, "silu"))
    config._experts_implementation = "eager"
    module = getattr(source, CLASSES[family])(config).to(dtype).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 1.0 if parameter.dim() < 3 else 2 * hidden**-0.5
            start = 1.0 if "norm" in name else 0.0
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=random) / 2)
    return module.requires_grad_(False)


class ToySlots:
    """More slots than experts, one reservation, in an order of the test's choice."""

    def __init__(self, layout: SlotLayout, count: int) -> None:
        self.stride = -(-layout.nbytes // 64) * 64 + 64
        self.memory = torch.full((count * self.stride + 64,), 0xFF, dtype=torch.uint8)
        self.base = -(-self.memory.data_ptr() // 64) * 64

    def address(self, slot: int) -> int:
        return self.base + slot * self.stride

    def raw(self, slot: int, spec: TensorSpec) -> Tensor:
        start = self.base - self.memory.data_ptr() + slot * self.stride + spec.offset
        return self.memory[start : start + spec.nbytes]

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        raw = self.raw(slot, spec)
        if spec.fields:
            raw = join(spec.fields, raw)
        return raw.view(getattr(torch, spec.dtype)).view(spec.shape)

    def put(self, slot: int, spec: TensorSpec, values: Tensor) -> None:
        """Write a tensor that is in the order of files."""
        raw = values.contiguous().view(torch.uint8).reshape(-1)
        if spec.fields:
            separate(spec.fields, raw, 0, self.raw(slot, spec))
        else:
            self.raw(slot, spec).copy_(raw)


def matrices(module: nn.Module) -> dict[str, Tensor]:
    """The expert parameters that are streamed: those with three dimensions."""
    return {name: p.data for name, p in module.named_parameters() if p.dim() == 3}


def layer_of(
    module: nn.Module,
    tensors: dict[str, Tensor] | None = None,
    seed: int = 0,
    first: int = 0,
    slots: Callable[[SlotLayout, int], Any] = ToySlots,
) -> tuple[LayerExperts, list[int]]:
    """A layer whose experts lie in random slots, and the slot of each expert."""
    tensors = matrices(module) if tensors is None else tensors
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    order = sorted(tensors)  # as in files: the down projection first
    layout = SlotLayout.pack([(k, tuple(tensors[k].shape[1:]), dtype) for k in order])
    memory = slots(layout, EXPERTS + 3)
    places = np.random.default_rng(seed).permutation(EXPERTS + 3)[:EXPERTS].tolist()
    for expert, slot in enumerate(places):
        for name, tensor in tensors.items():
            memory.tensor(slot, layout[name]).copy_(tensor[expert])
    return LayerExperts(module, layout, memory, first_channel=first), places


def inputs(
    dtype: torch.dtype,
    tokens: int,
    top_k: int = 3,
    hidden: int = HIDDEN,
    seed: int = 0,
    weights_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x [T, H], top_k_index [T, K], top_k_weights [T, K])."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    scores = torch.rand(tokens, EXPERTS, generator=random)
    index = scores.topk(top_k).indices
    return x, index, scores.gather(1, index).to(weights_dtype or dtype)


def compute(
    kernel: Kernel,
    layer: LayerExperts,
    places: list[int],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    groups: Iterable[list[int]] | None = None,
) -> Tensor:
    """Compute a step of an MoE layer.

    `groups` lists positions in the step's experts; by default all are one group.
    """
    routing = Routing.of(index.numpy(), layer.num_experts)
    step = kernel.begin(layer, x, routing, weights)
    for group in [range(len(routing.experts))] if groups is None else groups:
        chosen = [int(routing.experts[i]) for i in group]
        kernel.compute_group(step, chosen, [places[e] for e in chosen])
    return kernel.combine(step)
