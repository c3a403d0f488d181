"""The launches that a step of a real layer makes, recorded without a GPU.

Layers have the shapes of real models, and their tensors are on the meta device. A step of the
Triton kernel runs as on a GPU, but its launches are written down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from greenroom.runtime.kernels.segments import SegmentedExperts, SegmentedKernel
from greenroom.runtime.kernels.triton import TritonKernel, one_token, plan, programs
from greenroom.runtime.kernels.triton import kernel as steps
from greenroom.runtime.kernels.triton.chunks import CHUNKS, ZEROS
from greenroom.runtime.kernels.triton.expand import ENCODINGS
from greenroom.runtime.slots.block_fields import layout_in_fields
from greenroom.runtime.slots.cutting import Cutting
from tests.ggml_blocks import GGML

REPORT = Path(__file__).parents[2] / "benchmarks" / "gpu_report"
LAUNCHED = ((programs, "project"), (programs, "combine"), (one_token, "project_one"))
# Tokens of which all choose the same experts: one; a tile of few rows; prompts of more and of less
# than the 64 entries from which on some devices have larger tiles.
TOKENS = {"one": 1, "few": 16, "many": 512, "middle": 40}
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
    "signed8": ("int8", 64, "bfloat16"),
}
STORED = {"signed8": "symmetric8"}  # how layouts call encodings that kernels tell apart
FP8_BLOCK = 128
ALL = sorted({*ENCODINGS, *CHUNKS, *STORED})
ARCHITECTURES = (80, 89, 90, 100, 120)
FEW_ARCHITECTURES, OFTEN = (80, 90), 90
# All launches would be twice as many. So models but the first are compiled in the encodings in
# which they are distributed (others have the launches of the first but for biases, or for numbers
# that 16 divides), rare encodings for few architectures, float16 and segments for one.
RARE = {
    *("symmetric4", "symmetric8", "signed8", "affine4", "affine8", "ct_nvfp4"),
    *("q2_k", "q3_k", "q4_1", "q5_0", "q5_1", "iq4_nl"),
}
FIRST = "qwen3-30b-a3b"
OTHERS = {
    "gpt-oss-120b": (PLAIN, "mxfp4", "gguf_mxfp4"),
    "deepseek-v3": (PLAIN, "fp8", "q4_k"),
    "mixtral-8x7b": (PLAIN, "q4_0", "q4_k"),
}
MIDDLE = (PLAIN, "mxfp4", "q4_k")  # encodings of the first model with all of TOKENS
PROMPTS = ("one", "few", "many")
SEGMENTED = (PLAIN, "q8_0", "q6_k", "iq4_xs")  # whose split experts are compiled too
# Bytes of a block that have codes, without scales and without what is less than 16 bytes.
CODE_BYTES = {
    "q8_0": 32,
    "q4_0": 16,
    "q4_1": 16,
    "q5_0": 16,
    "q5_1": 16,
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
    """

    label: str
    encoding: str
    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def bits(self) -> float:
        """Bits of codes for each weight."""
        if self.encoding == PLAIN:
            return 16
        inputs, nbytes = BLOCKS[STORED.get(self.encoding, self.encoding)]
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


def layout_of(shape: Any, encoding: str, transposed: bool, dtype: str) -> SlotLayout | None:
    """An expert's slot, or None if the encoding's blocks do not divide the shape."""
    matrices = {"gate_up_proj": (2 * shape.inner, shape.hidden),
                "down_proj": (shape.hidden, shape.inner)}  # fmt: skip
    if encoding == PLAIN:
        turn = -1 if transposed else 1
        return SlotLayout.pack([(n, s[::turn], dtype) for n, s in matrices.items()])
    stored = STORED.get(encoding, encoding)
    inputs, nbytes = BLOCKS[stored]
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
                count = 2 if name == "gate_up_proj" else 1
                tensors.append((f"{name}.matrix_scale", (count, 1), "float32"))
    return layout_in_fields(SlotLayout.pack(tensors, dict.fromkeys(matrices, stored), dtype))


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
    upload, capability = steps.upload, plan.capability
    for module, name, function in before:
        setattr(module, name, Recorder(function, record))
    steps.upload = lambda numbers, device: torch.from_numpy(numbers).to("meta")
    plan.capability = lambda device: architecture // 10
    try:
        yield
    finally:
        steps.upload, plan.capability = upload, capability
        for module, name, function in before:
            setattr(module, name, function)


def launches_of(
    model: str,
    encoding: str,
    architecture: int,
    dtype: str = "bfloat16",
    sizes: Sequence[str] = tuple(TOKENS),
    segments: int = 0,
) -> list[Launch]:
    """The launches of a layer of a model.

    sizes: numbers of tokens, of TOKENS
    segments: of each expert, if experts are split; these launches have `segment` in their labels
    """
    shapes, layers = report()
    shape, kind = shapes.KERNELS[model], getattr(torch, dtype)
    module = layers.module_of(shape).to(kind)
    layout = layout_of(shape, encoding, bool(module.is_transposed), dtype)
    if layout is None:
        return []
    if segments:
        split = layout_in_fields(Cutting.of(module, layout).segments(segments, model))
        kernel: Any = SegmentedKernel(TritonKernel(), 1)
        layer: LayerExperts = SegmentedExperts(module, split, [MetaSlots(split)], 0)
    else:
        kernel, layer = TritonKernel(), LayerExperts(module, layout, MetaSlots(layout))
    made = list[Launch]()
    for size in sizes:
        made += _step(kernel, layer, size, encoding, (architecture, shape, kind), bool(segments))
    return made


def _step(
    kernel: Any, layer: LayerExperts, size: str, encoding: str, of: Any, segment: bool
) -> list[Launch]:
    """The launches of a step, for some tokens that all choose the same experts."""
    (architecture, shape, kind), tokens, made = of, TOKENS[size], list[Launch]()
    word = " segment" if segment else ""

    def record(function: Any, args: Any, options: Any) -> None:
        role = "up" if options.get("GATHERED") else "down"
        label = "sum" if function is programs.combine.function else f"{size} {role}{word}"
        made.append(Launch(label, encoding, function, args, options))

    x = torch.empty(tokens, shape.hidden, dtype=kind, device="meta")
    chosen = np.tile(np.arange(shape.top_k), (tokens, 1))
    weights = torch.empty(tokens, shape.top_k, dtype=kind, device="meta")
    with recording(record, architecture):
        step = kernel.begin(layer, x, Routing.of(chosen, shape.experts), weights)
        kernel.compute_group(step, range(shape.top_k), [0] * shape.top_k)
        kernel.combine(step)
    return made


def launches(encoding: str, architecture: int) -> list[Launch]:
    """The launches of an encoding's layers, of one of its architectures."""
    sizes = tuple(TOKENS) if encoding in MIDDLE else PROMPTS
    if encoding in RARE and architecture != OFTEN:
        sizes = ("one", "many")
    made = launches_of(FIRST, encoding, architecture, sizes=sizes)
    if encoding == "fp8":  # the nearest to its limit
        made += launches_of(FIRST, encoding, architecture, "float16", ("one",))
    for model, encodings in OTHERS.items():
        if encoding in encodings:
            made += launches_of(model, encoding, architecture, sizes=PROMPTS)
    if architecture != OFTEN:
        return made
    if encoding not in (*RARE, "fp8"):
        halves = PROMPTS if encoding == PLAIN else ("one",)
        made += launches_of(FIRST, encoding, architecture, "float16", halves)
    if encoding in SEGMENTED:
        made += launches_of(FIRST, encoding, architecture, sizes=("one", "many"), segments=4)
    return made


def architectures(encoding: str) -> tuple[int, ...]:
    """The compute capabilities, times ten, for which an encoding's launches are compiled."""
    return FEW_ARCHITECTURES if encoding in RARE else ARCHITECTURES
