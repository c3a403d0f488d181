"""The launches that a step of a real layer makes, recorded without a GPU.

Layers have the shapes of real models, and their tensors are on the meta device. A step of the
Triton kernel runs as on a GPU, but its launches are written down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenroom.core.layout import BLOCKS, ITEMSIZE, PLAIN, SlotLayout, TensorSpec
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import TritonKernel, kernel, one_token, plan, programs
from greenroom.runtime.kernels.triton.chunks import CHUNKS, ZEROS
from greenroom.runtime.kernels.triton.expand import ENCODINGS
from greenroom.runtime.slots.block_fields import layout_in_fields
from tests.ggml_blocks import GGML

REPORT = Path(__file__).parents[2] / "benchmarks" / "gpu_report"
LAUNCHED = ((programs, "project"), (programs, "combine"), (one_token, "project_one"))
# Tokens of which all choose the same experts: one; a tile of few rows; a prompt.
TOKENS = (1, 16, 512)
# Of the encodings with a scale in a tensor of its own: type of codes, their bytes, inputs to a
# scale, type of scales.
SCALED = {
    "int8": ("int8", 64, "float16"),
    "int4": ("uint8", 32, "float16"),
    "mxfp4": ("uint8", 32, "uint8"),
    "nvfp4": ("uint8", 16, "float8_e4m3fn"),
    "ct_nvfp4": ("uint8", 16, "float8_e4m3fn"),
    "symmetric4": ("int32", 32, "bfloat16"),
    "affine4": ("int32", 32, "float16"),
    "symmetric8": ("int32", 64, "bfloat16"),
    "affine8": ("int32", 64, "bfloat16"),
}
FP8_BLOCK = 128
# Encodings that are compiled for two architectures, in the shapes of one model, to save time.
RARE = {
    *("symmetric4", "symmetric8", "affine8", "ct_nvfp4"),
    *("q2_k", "q3_k", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs", "q5_k", "q6_k"),
}
ALL = sorted({*ENCODINGS, *CHUNKS})
# Bytes of a block's codes, where a block has scales too.
CODE_BYTES = {
    "q8_0": 32,
    "q4_0": 16,
    "q4_1": 16,
    "q5_0": 20,
    "q5_1": 20,
    "iq4_nl": 16,
    "gguf_mxfp4": 16,
    "q2_k": 64,
    "q3_k": 96,
    "q4_k": 128,
    "q5_k": 160,
    "q6_k": 192,
    "iq4_xs": 128,
}


@dataclass
class Launch:
    """A launch of a Triton function.

    label: the function's role, such as `one up`
    where: names of the models that make it
    """

    label: str
    encoding: str
    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    where: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Bits of codes for each weight."""
        if self.encoding == PLAIN:
            return 16
        inputs, nbytes = BLOCKS[self.encoding]
        return CODE_BYTES.get(self.encoding, nbytes) * 8 / inputs


class MetaSlots:
    """Slots on the meta device; all have the same address."""

    def __init__(self, layout: SlotLayout) -> None:
        self.stride = -(-layout.nbytes // 64) * 64

    def address(self, slot: int) -> int:
        return 0

    def tensor(self, slot: int, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


@cache
def report() -> tuple[Any, Any]:
    """The GPU report's modules of shapes and layers."""
    sys.path.insert(0, str(REPORT))
    try:
        return import_module("shapes"), import_module("kernel_layers")
    finally:
        sys.path.remove(str(REPORT))


def layout_of(shape: Any, encoding: str, transposed: bool) -> SlotLayout | None:
    """An expert's slot, or None if the encoding's blocks do not divide the shape."""
    matrices = {"gate_up_proj": (2 * shape.inner, shape.hidden),
                "down_proj": (shape.hidden, shape.inner)}  # fmt: skip
    if encoding == PLAIN:
        turn = -1 if transposed else 1
        return SlotLayout.pack([(n, s[::turn], "bfloat16") for n, s in matrices.items()])
    inputs, nbytes = BLOCKS[encoding]
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    for name, (rows, columns) in matrices.items():
        if columns % inputs or (encoding == "fp8" and columns % FP8_BLOCK):
            return None
        width = columns // inputs * nbytes
        if encoding in GGML:
            tensors.append((name, (rows, width), "uint8"))
        elif encoding == "fp8":
            tensors.append((name, (rows, width), "float8_e4m3fn"))
            blocks = rows // FP8_BLOCK, columns // FP8_BLOCK
            tensors.append((f"{name}.scale", blocks, "float32"))
        else:
            codes, group, scales = SCALED[encoding]
            tensors.append((name, (rows, width // ITEMSIZE[codes]), codes))
            tensors.append((f"{name}.scale", (rows, columns // group), scales))
            if encoding in ZEROS:
                tensors.append((f"{name}.zero", (rows, columns // group), "uint8"))
            if encoding.endswith("nvfp4"):
                stored = 2 if name == "gate_up_proj" else 1
                tensors.append((f"{name}.matrix_scale", (stored, 1), "float32"))
    return layout_in_fields(SlotLayout.pack(tensors, dict.fromkeys(matrices, encoding), "bfloat16"))


class Recorder:
    """Stands in for a Triton function: its launches are recorded."""

    def __init__(self, function: Any, record: Callable[..., None]) -> None:
        self.function, self.record = function, record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.record(self.function, args, options)

        return launch


@contextmanager
def recording(record: Callable[..., None], architecture: int) -> Iterator[None]:
    """Record the launches of the kernel's programs, and upload nothing."""
    before = [(module, name, getattr(module, name)) for module, name in LAUNCHED]
    upload, capability = kernel.upload, plan.capability
    for module, name, function in before:
        setattr(module, name, Recorder(function, record))
    kernel.upload = lambda numbers, device: torch.from_numpy(numbers).to("meta")
    plan.capability = lambda device: architecture // 10
    try:
        yield
    finally:
        kernel.upload, plan.capability = upload, capability
        for module, name, function in before:
            setattr(module, name, function)


def launches_of(model: str, encoding: str, architecture: int) -> list[Launch]:
    """The launches of a layer of a model, for all numbers of tokens."""
    shapes, layers = report()
    shape = shapes.KERNELS[model]
    module = layers.module_of(shape)
    layout = layout_of(shape, encoding, bool(module.is_transposed))
    if layout is None:
        return []
    layer, made = LayerExperts(module, layout, MetaSlots(layout)), list[Launch]()
    for tokens in TOKENS:
        size = {1: "one", 16: "few"}.get(tokens, "many")
        roles = iter((f"{size} up", f"{size} down", "sum"))

        def record(function: Any, args: Any, options: Any, roles: Iterator[str] = roles) -> None:
            made.append(Launch(next(roles), encoding, function, args, options, [model]))

        x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device="meta")
        chosen = np.tile(np.arange(shape.top_k), (tokens, 1))
        weights = torch.empty(tokens, shape.top_k, dtype=torch.bfloat16, device="meta")
        with recording(record, architecture):
            step = TritonKernel().begin(layer, x, Routing.of(chosen, shape.experts), weights)
            step.compute_group(range(shape.top_k), [0] * shape.top_k)
            step.total()
        assert next(roles, None) is None
    return made


def launches(encoding: str, architecture: int) -> list[Launch]:
    """The launches of an encoding's layers: of all models, or of the first that its blocks fit."""
    shapes, _ = report()
    made = list[Launch]()
    for model in shapes.KERNELS:
        if not made or encoding not in RARE:
            made += launches_of(model, encoding, architecture)
    return made


def architectures(encoding: str) -> tuple[int, ...]:
    """The compute capabilities, times ten, for which an encoding's launches are compiled."""
    return (80, 90) if encoding in RARE else (80, 89, 90, 100, 120)
