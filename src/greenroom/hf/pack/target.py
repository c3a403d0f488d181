"""What a packed expert and its copy look like, and how they are made of an expert in a slot."""

from __future__ import annotations

from collections.abc import Callable
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
from greenroom.hf.pack import quantise
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.encodings.packed import GROUP
from greenroom.runtime.slots.cutting import Cutting

SIDE = 128  # of a block of fp8
VECTOR = 32  # inputs; what the compiled kernels want a scale to cover a multiple of
ROOM = 1 << 20  # bytes of float32 at a time: they stay in the processor's cache

Lookup = Callable[[TensorSpec], Tensor]


def target_layout(kind: str, layout: SlotLayout, module: nn.Module, where: str) -> SlotLayout:
    """The layout of an expert of this module packed to `kind`; UnsupportedModel where it cannot be.

    `layout` is that of the source's slots, `where` the module's name, for messages.
    """
    if kind == "same":
        return layout
    made: list[tuple[str, tuple[int, ...], str]] = []
    names = [spec.name for spec in codes_of(layout)]
    for name in names:
        rows, columns = logical(layout.weight(name), bool(module.is_transposed))
        if kind == "fp8":
            gated = name == "gate_up_proj" and bool(module.is_concatenated)
            down, across = _side(rows // 2 if gated else rows, 1), _side(columns, VECTOR)
            made.append((name, (rows, columns), "float8_e4m3fn"))
            made.append((f"{name}.scale", (rows // down, columns // across), "float32"))
            continue
        group = gcd(columns, GROUP[kind])
        if kind == "int4" and columns % 2:
            raise UnsupportedModel(f"{where}.{name} has {columns} inputs: int4 packs them in pairs")
        codes = ((rows, columns // 2), "uint8") if kind == "int4" else ((rows, columns), "int8")
        made += [(name, *codes), (f"{name}.scale", (rows, columns // group), "float16")]
    dtype = layout.weight(names[0]).dtype
    return SlotLayout.pack(made, dict.fromkeys(names, kind), dtype)


def logical(weight: WeightSpec, transposed: bool) -> tuple[int, int]:
    """(outputs, inputs) of a matrix."""
    rows, columns = weight.shape
    return (columns, rows) if transposed and weight.encoding == PLAIN else (rows, columns)


def _side(length: int, unit: int) -> int:
    """The longest side of a block of at most 128 that divides a matrix's, in multiples of `unit`;
    the whole side where there is none."""
    sides = range(SIDE - SIDE % unit, 0, -unit)
    return next((side for side in sides if length % side == 0), length)


def low_copy_of(
    precision: str, kind: str, source: SlotLayout, exact: SlotLayout, module: nn.Module, where: str
) -> LowPrecisionCopy:
    """The copies of a layer whose experts are packed to `kind`, which gives the layout `exact`.
    UsageError where they would be no smaller."""
    nested = (kind, precision) == NESTED
    layout = (
        nested_copy_layout(exact) if nested else target_layout(precision, source, module, where)
    )
    low_copy = LowPrecisionCopy(precision, nested, layout)
    if low_copy.stride >= exact.nbytes:
        raise UsageError(
            f"--miss-precision {precision}: a copy of an expert of {where} would take"
            f" {low_copy.stride} bytes, the expert takes {exact.nbytes}: it must be smaller"
        )
    return low_copy


@dataclass(frozen=True)
class ExpertPacker:
    """Makes packed experts of one layer; `where` names it, for messages."""

    kind: str
    source: SlotLayout
    target: SlotLayout
    transposed: bool
    where: str
    cutting: Cutting | None = None  # where the target lies in segments

    def with_copy(self, low_copy: LowPrecisionCopy) -> tuple[ExpertPacker, ...]:
        """What makes copies, and these experts behind them."""
        if not low_copy.nested:
            copy = replace(self, kind=low_copy.precision, target=low_copy.layout)
            return copy, replace(self, target=_moved(self.target, low_copy.stride))
        rest = _moved(low_copy.remainder, low_copy.stride).tensors
        planes = tuple(replace(spec, name=f"{spec.name}.rest") for spec in rest)
        both = replace(low_copy.layout, tensors=low_copy.layout.tensors + planes)
        return (replace(self, kind="nested", target=both),)

    def __call__(self, source: Lookup, target: Lookup, expert: int) -> None:
        """Fill the target's tensors from the source's, some rows at a time.

        CheckpointError where a weight is not a finite number.
        """
        if self.cutting is None:
            self._whole(source, target, expert)
            return
        made = {
            spec: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in self.target.tensors
        }
        self._whole(source, made.__getitem__, expert)
        segments = self.target.segments
        ends = [*(segment.first for segment in segments[1:]), self.cutting.channels]
        for segment, end in zip(segments, ends, strict=True):
            own_specs = _moved(segment.layout, segment.offset).tensors
            for spec, own in zip(self.target.tensors, own_specs, strict=True):
                target(own).copy_(self.cutting.part(spec, made[spec], segment.first, end))

    def _whole(self, source: Lookup, target: Lookup, expert: int) -> None:
        if self.kind == "same":
            for spec, own in zip(self.source.tensors, self.target.tensors, strict=True):
                target(own).copy_(source(spec))
            return
        for spec in codes_of(self.source):
            self._matrix(spec.name, source, target, expert)

    def _matrix(self, name: str, source: Lookup, target: Lookup, expert: int) -> None:
        weight = self.source.weight(name)
        parts = [source(spec) for spec in weight.parts]
        made = [target(spec) for spec in self.target.weight(name).parts]
        rows, columns = logical(weight, self.transposed)
        unit = lcm(*(rows // len(part) for part in (*made, *parts[1:])))
        step = max(1, ROOM // (4 * columns * unit)) * unit
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            w = self._rows(weight, parts, row, stop)
            if not QUANTISERS[self.kind](w, *(_cut(part, row, stop, rows) for part in made)):
                raise CheckpointError(
                    f"expert {expert} of {self.where}: {name} has weights that are no finite"
                    " numbers"
                )

    def _rows(self, weight: WeightSpec, parts: list[Tensor], row: int, stop: int) -> np.ndarray:
        """Outputs row .. stop, [n, inputs] float32: the values that the model computes with."""
        if weight.encoding == PLAIN:
            w = parts[0][:, row:stop].T if self.transposed else parts[0][row:stop]
        else:
            rows, columns = weight.shape
            dtype: torch.dtype = getattr(torch, weight.dtype)
            own = [_cut(part, row, stop, rows) for part in parts]
            w = ENCODINGS[weight.encoding].decode(own, (stop - row, columns), dtype)
        return w.float().contiguous().numpy()


def _moved(layout: SlotLayout, by: int) -> SlotLayout:
    """The layout with its tensors so many bytes further on."""
    tensors = (replace(spec, offset=spec.offset + by) for spec in layout.tensors)
    return replace(layout, tensors=tuple(tensors))


def _cut(part: Tensor, row: int, stop: int, rows: int) -> Tensor:
    """What of the codes or scales of a matrix stands for rows `row` .. `stop`."""
    return part[row * len(part) // rows : stop * len(part) // rows]


def _grouped(
    quantise: Callable[..., bool], w: np.ndarray, codes: Tensor, scale: Tensor, *rest: Tensor
) -> bool:
    made = np.empty(scale.shape, np.float32)
    planes = [plane.numpy() for plane in (codes, *rest)]
    finite = quantise(w, w.shape[1] // made.shape[1], *planes, made)
    scale.copy_(torch.from_numpy(made))
    return finite


def _fp8(w: np.ndarray, codes: Tensor, scale: Tensor) -> bool:
    down, across = len(w) // len(scale), w.shape[1] // scale.shape[1]
    return quantise.fp8(w, down, across, codes.view(torch.uint8).numpy(), scale.numpy())


# Kind -> what fills codes, scales and more from rows, and says whether all were finite numbers.
QUANTISERS: dict[str, Callable[..., bool]] = {
    "int8": partial(_grouped, quantise.int8),
    "int4": partial(_grouped, quantise.int4),
    "nested": partial(_grouped, quantise.nested),
    "fp8": _fp8,
}
