"""A layer of random experts in slots on the device, and steps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from shapes import FP8_BLOCK, Shape
from torch import Tensor, nn

from greenroom.core.layout import BLOCKS, PLAIN, SlotLayout, TensorSpec
from greenroom.runtime.cuda.engine import Cuda, Engine
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.block_fields import layout_in_fields, separate

DTYPE = torch.bfloat16
SCALE = 2**-9  # of a code: activations stay of a useful size
# Of blocks with scales in them: where numbers of 16 bits are, and their value. Scales of parts of a
# block are codes of 6 bits.
HALVES = {
    "q8_0": ((0,), SCALE),
    "q4_0": ((0,), SCALE),
    "gguf_mxfp4": ((), 0.0),
    "q4_k": ((0, 2), SCALE / 32),
    "q5_k": ((0, 2), SCALE / 32),
    "q6_k": ((208,), SCALE / 32),
    "iq4_xs": ((0,), SCALE / 32),
}
EXPONENT = 127 - 9  # of scales of 8 bits without a sign


def engine_of(device: torch.device) -> Engine:
    """The engine that allocates memory on the device."""
    return Cuda(device.index or 0) if device.type == "cuda" else Engine()


def module_of(shape: Shape) -> nn.Module:
    """transformers' experts module of a shape, in bfloat16, its weights on the meta device."""
    sizes: dict[str, Any] = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k}
    if shape.family == "qwen3_moe":
        from transformers import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        sizes |= {"moe_intermediate_size": shape.inner, "num_experts": shape.experts}
    elif shape.family == "gpt_oss":
        from transformers import GptOssConfig as Config
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        sizes |= {"intermediate_size": shape.inner, "num_local_experts": shape.experts}
    elif shape.family == "deepseek_v3":
        from transformers import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Experts as Experts,
        )

        sizes |= {"moe_intermediate_size": shape.inner, "n_routed_experts": shape.experts}
    else:
        from transformers import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        sizes |= {"intermediate_size": shape.inner, "num_local_experts": shape.experts}
    config = Config(**sizes)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = Experts(config)
    assert module.num_experts == shape.experts
    return module.to(DTYPE).eval().requires_grad_(False)


def with_weights(module: nn.Module, device: torch.device, biases_only: bool = False) -> nn.Module:
    """The module with random parameters on the device; `biases_only`: its matrices stay meta."""
    for name, parameter in list(module.named_parameters()):
        if parameter.dim() == 3 and biases_only:
            continue
        values = torch.empty(parameter.shape, dtype=DTYPE, device=device).normal_(0, 0.02)
        setattr(module, name, nn.Parameter(values, requires_grad=False))
    return module


def layout_of(shape: Shape, encoding: str, transposed: bool = False) -> SlotLayout:
    """An expert's slot; `transposed` where the module has matrices [inputs, outputs]."""
    matrices = {"gate_up_proj": (2 * shape.inner, shape.hidden),
                "down_proj": (shape.hidden, shape.inner)}  # fmt: skip
    if encoding == PLAIN:
        turn = -1 if transposed else 1
        return SlotLayout.pack([(n, s[::turn], "bfloat16") for n, s in matrices.items()])
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for name, (rows, columns) in matrices.items():
        if encoding in HALVES:
            each, nbytes = BLOCKS[encoding]
            tensors.append((name, (rows, columns // each * nbytes), "uint8"))
            continue
        codes, scales = {
            "int8": ((columns, "int8"), (rows, columns // 64, "float16")),
            "int4": ((columns // 2, "uint8"), (rows, columns // 32, "float16")),
            "mxfp4": ((columns // 2, "uint8"), (rows, columns // 32, "uint8")),
            "nvfp4": ((columns // 2, "uint8"), (rows, columns // 16, "float8_e4m3fn")),
            "fp8": (
                (columns, "float8_e4m3fn"),
                (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), "float32"),
            ),
        }[encoding]
        tensors.append((name, (rows, codes[0]), codes[1]))
        tensors.append((f"{name}.scale", scales[:2], scales[2]))
        if encoding == "nvfp4":
            stored = 2 if name == "gate_up_proj" else 1
            tensors.append((f"{name}.matrix_scale", (stored, 1), "float32"))
    return layout_in_fields(SlotLayout.pack(tensors, dict.fromkeys(matrices, encoding), "bfloat16"))


def fill(slots: DeviceSlots, slot: int, layout: SlotLayout, encoding: str) -> None:
    """Random weights of a useful size in a slot."""
    for spec in layout.tensors:
        if encoding in HALVES:
            fill_blocks(slots.bytes(slot)[spec.offset : spec.offset + spec.nbytes], spec, encoding)
            continue
        tensor = slots.tensor(slot, spec)
        if encoding == PLAIN:
            tensor.normal_(0, 0.02)
        elif spec.name.endswith(".matrix_scale"):
            tensor.fill_(1)
        elif spec.name.endswith(".scale"):
            tensor.fill_(EXPONENT if tensor.dtype is torch.uint8 else SCALE)
        else:
            codes = tensor.view(torch.uint8)
            codes.random_(0, 256)
            if encoding == "fp8":
                codes &= 0xBF  # below 2, and no NaN


def fill_blocks(matrix: Tensor, spec: TensorSpec, encoding: str) -> None:
    """Random blocks in the bytes of a matrix."""
    places, scale = HALVES[encoding]
    blocks = torch.empty_like(matrix).random_(0, 256).view(-1, BLOCKS[encoding][1])
    for place in places:
        half = torch.tensor([scale], dtype=torch.float16, device=matrix.device)
        blocks[:, place : place + 2] = half.view(torch.uint8)
    if encoding == "gguf_mxfp4":
        blocks[:, 0] = EXPONENT
    if spec.fields:
        separate(spec.fields, blocks.view(-1), 0, matrix)
    else:
        matrix.copy_(blocks.view(-1))


@dataclass
class Layer:
    """Experts in slots; where memory is short, several experts share a slot."""

    shape: Shape
    experts: LayerExperts
    capacity: int
    nbytes: int  # of an expert

    @classmethod
    def make(cls, shape: Shape, encoding: str, device: torch.device, most: int) -> Layer:
        """At most `most` bytes of slots, but enough for the experts of two tokens."""
        module = with_weights(module_of(shape), device, biases_only=True)
        layout = layout_of(shape, encoding, bool(module.is_transposed))
        fewest = min(shape.experts, 2 * shape.top_k)
        capacity = max(fewest, min(shape.experts, most // layout.nbytes))
        slots = DeviceSlots(engine_of(device), capacity, layout.nbytes, capacity)
        for slot in range(capacity):
            fill(slots, slot, layout, encoding)
        return cls(shape, LayerExperts(module, layout, slots), capacity, layout.nbytes)

    def slots_of(self, experts: list[int]) -> list[int]:
        """Slots of experts."""
        return [expert % self.capacity for expert in experts]


def choices(shape: Shape, tokens: int, count: int, seed: int = 0) -> list[Any]:
    """`count` choices of experts [tokens, top_k]; of one token each, they share no expert."""
    random = np.random.default_rng(seed)
    if tokens == 1:
        sets = random.permutation(shape.experts)[: shape.experts // shape.top_k * shape.top_k]
        return list(sets.reshape(-1, 1, shape.top_k)[:count])
    scores = random.random((count, tokens, shape.experts))
    return list(np.argsort(scores, axis=-1)[..., : shape.top_k].astype(np.int64))


def inputs(shape: Shape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(x [tokens, hidden], gate weights [tokens, top_k])."""
    x = torch.randn(tokens, shape.hidden, device=device).to(DTYPE)
    weights = torch.rand(tokens, shape.top_k, device=device).to(DTYPE) / shape.top_k
    return x, weights


def whole_step(kernel: Any, layer: Layer, x: Tensor, weights: Tensor, choice: Any) -> Tensor:
    """A step as a model takes it: routing, upload, launches, sum."""
    routing = Routing.of(choice, layer.shape.experts)
    step = kernel.begin(layer.experts, x, routing, weights)
    chosen = routing.experts.tolist()
    kernel.compute_group(step, chosen, layer.slots_of(chosen))
    return kernel.combine(step)
