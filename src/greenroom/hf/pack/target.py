"""What a packed expert looks like, and how it is made of one that lies in a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import PLAIN, SlotLayout, TensorSpec, WeightSpec
from greenroom.errors import CheckpointError, UnsupportedModel
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
    names = [spec.name for spec in layout.tensors if "." not in spec.name]
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


@dataclass(frozen=True)
class Maker:
    """Makes packed experts of one layer; `where` names it, for messages."""

    kind: str
    source: SlotLayout
    target: SlotLayout
    transposed: bool
    where: str
    cutting: Cutting | None = None  # where the target lies in segments

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
            for spec, own in zip(self.target.tensors, segment.layout.tensors, strict=True):
                place = replace(own, offset=segment.offset + own.offset)
                target(place).copy_(self.cutting.part(spec, made[spec], segment.first, end))

    def _whole(self, source: Lookup, target: Lookup, expert: int) -> None:
        if self.kind == "same":
            for spec in self.source.tensors:
                target(spec).copy_(source(spec))
            return
        for spec in self.source.tensors:
            if "." not in spec.name:
                self._matrix(spec.name, source, target, expert)

    def _matrix(self, name: str, source: Lookup, target: Lookup, expert: int) -> None:
        weight, made = self.source.weight(name), self.target.weight(name)
        parts, fill = [source(spec) for spec in weight.parts], self._fill(name, target)
        rows, columns = logical(weight, self.transposed)
        per = rows // made.parts[1].shape[0]
        unit = lcm(per, *(rows // len(part) for part in parts[1:]))
        step = max(1, ROOM // (4 * columns * unit)) * unit
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            if not fill(self._rows(weight, parts, row, stop), row, stop, per):
                raise CheckpointError(
                    f"expert {expert} of {self.where}: {name} has weights that are no finite"
                    " numbers"
                )

    def _fill(self, name: str, target: Lookup) -> Callable[[np.ndarray, int, int, int], bool]:
        """What fills a matrix: (weights of rows row .. stop, row, stop, rows that share a scale) ->
        whether all of them were finite numbers."""
        codes, scale = (target(spec) for spec in self.target.weight(name).parts)
        quantiser = QUANTISERS[self.kind]

        def fill(w: np.ndarray, row: int, stop: int, per: int) -> bool:
            return bool(quantiser(w, codes[row:stop], scale[row // per : stop // per]))

        return fill

    def _rows(self, weight: WeightSpec, parts: list[Tensor], row: int, stop: int) -> np.ndarray:
        """Outputs row .. stop, [n, inputs] float32: the values that the model computes with."""
        if weight.encoding == PLAIN:
            w = parts[0][:, row:stop].T if self.transposed else parts[0][row:stop]
        else:
            rows, columns = weight.shape
            cut = [part[row * len(part) // rows : stop * len(part) // rows] for part in parts]
            dtype: torch.dtype = getattr(torch, weight.dtype)
            w = ENCODINGS[weight.encoding].decode(cut, (stop - row, columns), dtype)
        return w.float().contiguous().numpy()


def _int8(w: np.ndarray, codes: Tensor, scale: Tensor) -> bool:
    made = np.empty(scale.shape, np.float32)
    right = quantise.int8(w, w.shape[1] // made.shape[1], codes.numpy(), made)
    scale.copy_(torch.from_numpy(made))
    return bool(right)


def _int4(w: np.ndarray, codes: Tensor, scale: Tensor) -> bool:
    made = np.empty(scale.shape, np.float32)
    right = quantise.int4(w, w.shape[1] // made.shape[1], codes.numpy(), made)
    scale.copy_(torch.from_numpy(made))
    return bool(right)


def _fp8(w: np.ndarray, codes: Tensor, scale: Tensor) -> bool:
    down, across = len(w) // len(scale), w.shape[1] // scale.shape[1]
    return bool(quantise.fp8(w, down, across, codes.view(torch.uint8).numpy(), scale.numpy()))


QUANTISERS: dict[str, Any] = {"int8": _int8, "int4": _int4, "fp8": _fp8}
