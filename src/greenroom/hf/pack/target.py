"""Layouts of packed experts and their low-precision copies, and the encoding of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, lcm

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import PLAIN, SlotLayout, TensorSpec, WeightSpec
from greenroom.errors import CheckpointError, UnsupportedModel, UsageError
from greenroom.hf.checkpoint.pack.copies import (
    NESTED,
    LowPrecisionCopy,
    codes_of,
    nested_copy_layout,
)
from greenroom.hf.pack import exponents, quantise
from greenroom.runtime.encodings import bf12, decode
from greenroom.runtime.encodings.packed import GROUP
from greenroom.runtime.slots.cutting import Cutting

SIDE = 128  # rows or columns of an fp8 block, at most
VECTOR = 32  # inputs; compiled kernels need scales that cover a multiple of them
BATCH = 1 << 20  # bytes of float32 rows at a time: they stay in the processor's cache

Lookup = Callable[[TensorSpec], Tensor]


def target_layout(kind: str, layout: SlotLayout, module: nn.Module, where: str) -> SlotLayout:
    """Return the layout of a packed expert.

    kind:   the encoding of packed experts: int8, int4, fp8, bf12 or same
    layout: the layout of the source's experts in memory
    module: the experts module, and `where` its name, for messages

    Raises UnsupportedModel for int4 if a matrix has an odd number of inputs, and for bf12 if its
    weights are not bfloat16, or a matrix has a number of inputs that bf12 does not allow.
    """
    if kind == "same":
        return layout
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    names = [spec.name for spec in codes_of(layout)]
    for name in names:
        rows, columns = logical_shape(layout.weight(name), bool(module.is_transposed))
        if kind == "fp8":
            gated = name == "gate_up_proj" and bool(module.is_concatenated)
            down, across = (
                _block_side(rows // 2 if gated else rows, 1),
                _block_side(columns, VECTOR),
            )
            tensors.append((name, (rows, columns), "float8_e4m3fn"))
            tensors.append((f"{name}.scale", (rows // down, columns // across), "float32"))
            continue
        if kind == "bf12":
            tensors += _bf12_tensors(layout.weight(name), rows, columns, where)
            continue
        group = gcd(columns, GROUP[kind])
        if kind == "int4" and columns % 2:
            raise UnsupportedModel(
                f"{where}.{name} has {columns} inputs, but int4 needs an even number: choose int8"
            )
        codes = ((rows, columns // 2), "uint8") if kind == "int4" else ((rows, columns), "int8")
        tensors += [(name, *codes), (f"{name}.scale", (rows, columns // group), "float16")]
    dtype = layout.weight(names[0]).dtype
    return SlotLayout.pack(tensors, dict.fromkeys(names, kind), dtype)


def _bf12_tensors(
    weight: WeightSpec, rows: int, columns: int, where: str
) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the tensors of a matrix in bf12: names, shapes and dtypes."""
    name = f"{where}.{weight.name}"
    if weight.encoding not in (PLAIN, "bf12") or weight.dtype != "bfloat16":
        stored = weight.dtype if weight.encoding == PLAIN else weight.encoding
        raise UnsupportedModel(
            f"{name} has weights in {stored}, but bf12 stores bfloat16: choose same"
        )
    if columns % bf12.UNIT or columns > bf12.LONGEST:
        raise UnsupportedModel(
            f"{name} has {columns} inputs, but bf12 needs a multiple of {bf12.UNIT}, at most"
            f" {bf12.LONGEST}: choose same"
        )
    return [
        (weight.name, (rows, columns // 2 * 3), "uint8"),
        (f"{weight.name}.ends", (rows, 1), "int32"),
        (f"{weight.name}.exponents", (1, 16), "uint8"),
        (f"{weight.name}.escapes", (1, bf12.escape_room(rows, columns)), "int32"),
    ]


def logical_shape(weight: WeightSpec, transposed: bool) -> tuple[int, int]:
    """Return a weight matrix's (outputs, inputs), even if it is stored transposed.

    `transposed` is the `is_transposed` of the experts module.
    """
    rows, columns = weight.shape
    return (columns, rows) if transposed and weight.encoding == PLAIN else (rows, columns)


def _block_side(length: int, unit: int) -> int:
    """Return the side of fp8's scale blocks for a matrix's side of a given length.

    It is the largest divisor of `length` that is at most 128 and a multiple of `unit`, or `length`
    itself if there is none.
    """
    sides = range(SIDE - SIDE % unit, 0, -unit)
    return next((side for side in sides if length % side == 0), length)


def low_copy_of(
    precision: str, kind: str, source: SlotLayout, exact: SlotLayout, module: nn.Module, where: str
) -> LowPrecisionCopy:
    """Return the form of the low-precision copies of a layer's experts in a pack.

    precision: of the copies, int8 or int4
    kind:      the encoding of the packed experts, and `exact` their layout
    source:    the layout of the source's experts in memory
    module:    the experts module, and `where` its name, for messages

    Raises UsageError if a copy would not be smaller than its expert.
    """
    nested = (kind, precision) == NESTED
    layout = (
        nested_copy_layout(exact) if nested else target_layout(precision, source, module, where)
    )
    low_copy = LowPrecisionCopy(precision, nested, layout)
    if low_copy.stride >= exact.nbytes:
        raise UsageError(
            f"--miss-precision {precision}: a low-precision copy of an expert of {where} has"
            f" {low_copy.stride} bytes, but must be smaller than the expert, which has"
            f" {exact.nbytes}: choose fewer bits, or leave out --miss-precision"
        )
    return low_copy


@dataclass(frozen=True)
class ExpertPacker:
    """Encoder of one layer's experts for a pack.

    kind:       the encoding of packed experts
    source:     the layout of the source's experts in memory
    target:     the layout of packed experts
    transposed: the `is_transposed` of the experts module
    where:      the name of the experts module, for messages
    cutting:    how experts are divided into segments, if the pack has segments
    """

    kind: str
    source: SlotLayout
    target: SlotLayout
    transposed: bool
    where: str
    cutting: Cutting | None = None  # where the target has segments

    def with_copies(self, low_copy: LowPrecisionCopy) -> tuple[ExpertPacker, ...]:
        """Return encoders for low-precision copies, and for the experts that follow them.

        If the copies are nested in the experts, a single encoder writes both.
        """
        if not low_copy.nested:
            copy = replace(self, kind=low_copy.precision, target=low_copy.layout)
            return copy, replace(self, target=_shift(self.target, low_copy.stride))
        remainder = _shift(low_copy.remainder, low_copy.stride).tensors
        planes = tuple(replace(spec, name=f"{spec.name}.rest") for spec in remainder)
        both = replace(low_copy.layout, tensors=low_copy.layout.tensors + planes)
        return (replace(self, kind="nested", target=both),)

    def __call__(self, source: Lookup, target: Lookup, expert: int) -> None:
        """Encode one expert, in batches of rows.

        `source` and `target` return the tensor at a place of the source's and the packed expert's
        layout; `expert` is the expert's number, for messages. Raises CheckpointError for weights
        that the encoding cannot store: infinite or NaN ones, or for bf12 too many rare exponents.
        """
        if self.cutting is None:
            self._encode(source, target, expert)
            return
        unsplit = {
            spec: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in self.target.tensors
        }
        self._encode(source, unsplit.__getitem__, expert)
        segments = self.target.segments
        ends = [*(segment.first for segment in segments[1:]), self.cutting.channels]
        for segment, end in zip(segments, ends, strict=True):
            parts = _shift(segment.layout, segment.offset).tensors
            for spec, part in zip(self.target.tensors, parts, strict=True):
                target(part).copy_(self.cutting.cut(spec, unsplit[spec], segment.first, end))

    def _encode(self, source: Lookup, target: Lookup, expert: int) -> None:
        if self.kind == "same":
            for spec, copied in zip(self.source.tensors, self.target.tensors, strict=True):
                target(copied).copy_(source(spec))
            return
        for spec in codes_of(self.source):
            self._matrix(spec.name, source, target, expert)

    def _matrix(self, name: str, source: Lookup, target: Lookup, expert: int) -> None:
        weight = self.source.weight(name)
        parts = [source(spec) for spec in weight.parts]
        outputs = [target(spec) for spec in self.target.weight(name).parts]
        rows, columns = logical_shape(weight, self.transposed)
        scales = parts[1:] if len(weight.halves) == 1 else []
        unit = lcm(*(rows // len(part) for part in (*outputs, *scales)))
        step = max(1, BATCH // (4 * columns * unit)) * unit
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            w = self._rows(weight, parts, row, stop)
            if not QUANTISERS[self.kind](
                w, *(_rows_of_part(part, row, stop, rows) for part in outputs)
            ):
                raise CheckpointError(
                    f"expert {expert} of {self.where} cannot be packed: {name} has"
                    f" {REFUSALS[self.kind]}"
                )

    def _rows(self, weight: WeightSpec, parts: list[Tensor], row: int, stop: int) -> np.ndarray:
        """Decode a range of a matrix's outputs, from `row` up to `stop`.

        Returns float32 [outputs, inputs]; the values are those with which the model computes.
        """
        if weight.encoding == PLAIN:
            w = parts[0][:, row:stop].T if self.transposed else parts[0][row:stop]
        else:
            dtype: torch.dtype = getattr(torch, weight.dtype)
            w = torch.cat([*_decoded(weight, parts, row, stop, dtype)])
        return w.float().contiguous().numpy()


def _decoded(
    weight: WeightSpec, parts: list[Tensor], row: int, stop: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Decode the rows `row` .. `stop` of a matrix, or of its gate and then its up projection."""
    halves = weight.halves
    groups = [parts] if len(halves) == 1 else [[part] for part in parts]
    for i, (half, group) in enumerate(zip(halves, groups, strict=True)):
        rows = half.shape[0]
        a, b = (min(max(n - i * rows, 0), rows) for n in (row, stop))
        if a < b:
            codes = [_rows_of_part(part, a, b, rows) for part in group]
            yield decode(replace(half, shape=(b - a, half.shape[1])), codes, dtype)


def _shift(layout: SlotLayout, by: int) -> SlotLayout:
    """Return a layout with all tensors moved by a number of bytes."""
    tensors = (replace(spec, offset=spec.offset + by) for spec in layout.tensors)
    return replace(layout, tensors=tuple(tensors))


def _rows_of_part(part: Tensor, row: int, stop: int, rows: int) -> Tensor:
    """Return the codes or scales of the rows `row` .. `stop` of a matrix with `rows` rows."""
    return part[row * len(part) // rows : stop * len(part) // rows]


def _grouped(
    quantise: Callable[..., bool], w: np.ndarray, codes: Tensor, scale: Tensor, *planes: Tensor
) -> bool:
    scales = np.empty(scale.shape, np.float32)
    outputs = [plane.numpy() for plane in (codes, *planes)]
    finite = quantise(w, w.shape[1] // scales.shape[1], *outputs, scales)
    scale.copy_(torch.from_numpy(scales))
    return finite


def _fp8(w: np.ndarray, codes: Tensor, scale: Tensor) -> bool:
    down, across = len(w) // len(scale), w.shape[1] // scale.shape[1]
    return quantise.fp8(w, down, across, codes.view(torch.uint8).numpy(), scale.numpy())


def _bf12(w: np.ndarray, *outputs: Tensor) -> bool:
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    return exponents.bf12(bits, *(output.numpy() for output in outputs))


# Kind -> a function that fills codes and scales from rows; False for weights that it cannot store.
QUANTISERS: dict[str, Callable[..., bool]] = {
    "int8": partial(_grouped, quantise.int8),
    "int4": partial(_grouped, quantise.int4),
    "nested": partial(_grouped, quantise.nested),
    "fp8": _fp8,
    "bf12": _bf12,
}
_NOT_FINITE = (
    "weights that are infinite, NaN or too large: download the model again, or use --experts same"
)
REFUSALS = dict.fromkeys(QUANTISERS, _NOT_FINITE) | {
    "bf12": "too many weights with rare exponents for bf12: use --experts same"
}
