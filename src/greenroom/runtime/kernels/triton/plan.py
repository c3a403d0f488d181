"""The constant arguments of Triton's kernels: those of a matrix, and those of an MoE layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
from torch import Tensor

from greenroom.core.layout import BLOCKS, ITEMSIZE, PLAIN, TensorSpec, WeightSpec
from greenroom.errors import UsageError
from greenroom.runtime.kernels.activation import Activation, find_activation
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.triton import chunks, programs
from greenroom.runtime.kernels.triton.ggml import BLOCK_ENCODINGS
from greenroom.runtime.slots.block_fields import FIELDS

GGUF = ("gguf_mxfp4", *BLOCK_ENCODINGS)  # codes and scales in one tensor
NVFP4 = ("nvfp4", "ct_nvfp4")
# Types of the last field of a block, where it is not float16: 32 bits are two of these.
SCALES = {"gguf_mxfp4": "uint8", **dict.fromkeys(("q4_1", "q5_1", "q2_k"), "int32")}
# Major compute capabilities whose tensor cores multiply 64 rows at once, and so have large tiles.
LARGE_TILES = (9, 10)


@dataclass(frozen=True, slots=True)
class TritonMatrix:
    """A weight matrix's constant Triton kernel arguments.

    codes, scales: views of slot 0 as vectors, in the types of the matrix's codes and scales
    others: view of slot 0 as a vector of float32, for matrix scales
    """

    codes: Tensor
    scales: Tensor
    others: Tensor
    numbers: tuple[int, ...]  # code_at, scale_at, other_at, row_n, row_k, scale_n, span_n, span_k
    encoding: str
    units: tuple[int, int]  # elements of codes and of scales in a unit of a slot's offset
    chunk: int  # weights in 16 bytes of codes
    group: int  # inputs that share a scale; 0 if programs cannot read the matrix in chunks

    @classmethod
    def of(cls, layer: LayerExperts, weight: WeightSpec) -> TritonMatrix:
        """Make the constant Triton kernel arguments for an MoE layer's weight matrix."""
        if weight.parts[0].fields:
            return cls._in_fields(layer, weight)
        codes, scales, others = weight.parts[0], weight.parts[:2][-1], weight.parts[-1]
        code, scale = codes.dtype, scales.dtype
        rows, row_n, row_k, scale_n, span = weight.shape[0], codes.shape[1], 1, 0, (1, 1)
        if weight.encoding == PLAIN and layer.transposed:
            row_n, row_k = 1, codes.shape[1]
        if weight.encoding == "fp8":  # read as bytes: not every device knows the type
            code = "uint8"
            span = rows // scales.shape[0], weight.shape[1] // scales.shape[1]
        encoding = weight.encoding
        if encoding in chunks.AFFINE:  # 32 bits have several codes
            row_n, encoding = codes.nbytes // rows, "signed8" if code == "int8" else encoding
            code = "uint8"
        if weight.encoding in NVFP4:
            scale, span = "uint8", (rows // others.shape[0], weight.shape[1])
        if weight.encoding in GGUF:
            code, scale = "uint8", "float16"
        elif weight.encoding != PLAIN:
            scale_n = scales.shape[1]
        sizes = ITEMSIZE[code], ITEMSIZE[scale]
        return cls(
            _anchor(layer, code),
            _anchor(layer, scale),
            _anchor(layer, "float32"),
            (
                *(codes.offset // sizes[0], scales.offset // sizes[1], others.offset // 4),
                *(row_n, row_k, scale_n, *span),
            ),
            encoding,
            (programs.UNIT // sizes[0], programs.UNIT // sizes[1]),
            chunks.CHUNKS.get(weight.encoding, 0),
            group_of(weight),
        )

    def has_one_scale(self, outputs: int, rows: int, interleaved: bool) -> bool:
        """Check that programs of `rows` outputs have one row of scales, of fp8."""
        span = self.numbers[6]
        return self.encoding == "fp8" and outputs % rows == span % (rows << interleaved) == 0

    @classmethod
    def _in_fields(cls, layer: LayerExperts, weight: WeightSpec) -> TritonMatrix:
        """Make the arguments for a matrix in the order of fields: codes come first, scales last."""
        codes, encoding, rows = weight.parts[0], weight.encoding, weight.shape[0]
        blocks, scale = codes.nbytes // BLOCKS[encoding][1], SCALES.get(encoding, "float16")
        sizes = [blocks * nbytes for _, nbytes in FIELDS[encoding]]
        starts = [*accumulate(sizes, initial=codes.offset)]
        size, second = ITEMSIZE[scale], starts[1]
        return cls(
            _anchor(layer, "uint8"),
            _anchor(layer, scale),
            _anchor(layer, "float32"),
            (
                *(starts[0], starts[-2] // size, second // 4),
                *(sizes[0] // rows, 1, blocks // rows, sizes[1] // 4, 1),
            ),
            "int8" if encoding == "q8_0" else encoding,
            (programs.UNIT, programs.UNIT // size),
            chunks.CHUNKS[encoding],
            group_of(weight),
        )


def group_of(weight: WeightSpec) -> int:
    """Return the inputs that share a scale; 0: not read in chunks."""
    columns, chunk = weight.shape[1], chunks.CHUNKS.get(weight.encoding, 0)
    if not chunk or columns % chunk:
        return 0
    if weight.encoding in FIELDS:
        return max(chunk, 32) if weight.parts[0].fields else 0
    if len(weight.parts) == 1:
        return chunk
    group = columns // weight.parts[1].shape[1]
    # Scales and zeros of one byte are read in pairs; others are one for a chunk, or for several.
    pairs = columns % (2 * group) == 0 or ITEMSIZE[weight.parts[1].dtype] > 1
    if weight.encoding in chunks.ZEROS:
        pairs = columns % (2 * group) == 0 and weight.parts[0].dtype != "int8"
    return group if pairs and (group % chunk == 0 or weight.encoding in NVFP4) else 0


def _anchor(layer: LayerExperts, dtype: str) -> Tensor:
    """Return slot 0 as a vector; offsets of other slots are relative to it."""
    elements = layer.slots.stride // ITEMSIZE[dtype]
    return layer.slots.tensor(0, TensorSpec("slot", (elements,), dtype, 0))


class TritonLayerPlan:
    """The constant Triton kernel arguments of one MoE layer.

    Raises UsageError if the layer's slots are in host memory, unless Triton's interpreter runs.
    """

    def __init__(self, layer: LayerExperts) -> None:
        self.up, self.down = (
            TritonMatrix.of(layer, w) for w in (layer.up_weight, layer.down_weight)
        )
        self.activation: Activation = find_activation(layer)
        self.device = self.up.codes.device
        self.start = self.up.codes.data_ptr()
        # Encodings whose codes are read one by one need too many registers for large tiles.
        wide = all(each.group or each.encoding == PLAIN for each in (self.up, self.down))
        self.large_tiles = wide and capability(self.device) in LARGE_TILES
        # An argument is needed where there is no bias too.
        self.no_bias = torch.zeros(1, dtype=layer.dtype, device=self.device)
        # The interpreter's products have no bfloat16; it is for tests, not for speed.
        self.wide = self.device.type == "cpu"
        if self.wide and not triton.knobs.runtime.interpret:
            raise UsageError(
                "--kernels triton needs a GPU: use --kernels native or eager, or --device cuda"
            )

    def is_valid(self, layer: LayerExperts) -> bool:
        """Check that slot 0 is where it was.

        A device that was taken away and added again has other memory.
        """
        return self.up.codes.data_ptr() == layer.in_slots.slots.address(0)

    def offset(self, layer: LayerExperts, slot: int) -> int:
        """Return the offset of one of a layer's slots, in units of 64 bytes.

        The offset counts from slot 0 of the plan. `layer` may describe other slots than the plan's,
        such as those of a segment.
        """
        return (layer.slots.address(slot) - self.start) // programs.UNIT


def capability(device: torch.device) -> int:
    """Return the major number of a GPU's compute capability; 0 for the interpreter's CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def plan_of(layer: LayerExperts) -> TritonLayerPlan:
    """Return the constant Triton kernel arguments of an MoE layer.

    They are made at the first call, and again when slots have other memory.
    """
    plan = layer.plan
    if not isinstance(plan, TritonLayerPlan) or not plan.is_valid(layer):
        plan = layer.plan = TritonLayerPlan(layer.in_slots)
    return plan
