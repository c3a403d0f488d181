"""Low-precision copies in a pack: where they lie beside their experts, and how both are made.

An expert's run begins with its copy, padded to whole blocks; what follows is the expert itself, or,
where the two are nested, what the copy lacks of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import Copy, SlotLayout, TensorSpec
from greenroom.errors import UsageError
from greenroom.hf.pack import quantise
from greenroom.hf.pack.target import Lookup, Maker, target_layout
from greenroom.runtime.encodings.encoding import nibbles
from greenroom.runtime.encodings.packed import GROUP
from greenroom.runtime.nested import STEP, Nesting, Planes

BLOCK = 4096
PRECISIONS = ("int8", "int4")
NESTED = "int8", "int4"  # what an expert is packed to, and the copy that it is made to contain


@dataclass(frozen=True, slots=True)
class Low:
    """The copies of a layer's experts: `layout` is a copy's, from the beginning of the run."""

    precision: str
    nested: bool
    layout: SlotLayout

    @property
    def stride(self) -> int:
        """Bytes of a copy in whole blocks: what is read of it, and where the expert begins."""
        return -(-self.layout.nbytes // BLOCK) * BLOCK

    @property
    def rest(self) -> SlotLayout:
        """What a nested copy lacks: a plane of each matrix, from the end of the copy."""
        return SlotLayout.pack([(s.name, s.shape, s.dtype) for s in codes_of(self.layout)])

    def beside(self, exact: SlotLayout) -> int:
        """Bytes of what follows the copy."""
        return self.rest.nbytes if self.nested else exact.nbytes


def codes_of(layout: SlotLayout) -> list[TensorSpec]:
    """The codes of each matrix, without scales."""
    return [spec for spec in layout.tensors if "." not in spec.name]


def low_of(
    precision: str, kind: str, source: SlotLayout, exact: SlotLayout, module: nn.Module, where: str
) -> Low:
    """The copies of a layer whose experts are packed to `kind`, which gives the layout `exact`.
    UsageError where they would be no smaller."""
    nested = (kind, precision) == NESTED
    layout = nested_layout(exact) if nested else target_layout(precision, source, module, where)
    low = Low(precision, nested, layout)
    if low.stride >= exact.nbytes:
        raise UsageError(
            f"--miss-precision {precision}: a copy of an expert of {where} would take"
            f" {low.stride} bytes, the expert takes {exact.nbytes}: it must be smaller"
        )
    return low


def nested_layout(exact: SlotLayout) -> SlotLayout:
    """The layout of copies that experts of this one contain."""
    kind, precision = NESTED
    made = []
    for spec in codes_of(exact):
        rows, columns = spec.shape
        group = gcd(columns, GROUP[kind])
        made.append((spec.name, (rows, columns // 2), "uint8"))
        made.append((f"{spec.name}.scale", (rows, columns // group), "float16"))
    names = [spec.name for spec in codes_of(exact)]
    return SlotLayout.pack(made, dict.fromkeys(names, precision), exact.dtype)


def nesting_of(low: Low, exact: SlotLayout) -> tuple[Nesting, tuple[Copy, ...], tuple[Copy, ...]]:
    """(how experts are joined, the copies that fill a slot with both planes, and with the rest)."""
    rest, planes, first, second = low.rest, [], [], []
    for spec in codes_of(exact):
        scale, half = exact[f"{spec.name}.scale"], spec.nbytes // 2
        planes.append(Planes(spec.offset, spec.nbytes, scale.offset, scale.nbytes))
        first.append(as_it_is(low.layout[spec.name].offset, spec.offset, half))
        first.append(as_it_is(low.layout[scale.name].offset, scale.offset, scale.nbytes))
        second.append(as_it_is(rest[spec.name].offset, spec.offset + half, half))
    both = (*first, *(replace(copy, source=copy.source + low.stride) for copy in second))
    totals = {both: low.stride + rest.nbytes, tuple(second): rest.nbytes}
    return Nesting(tuple(planes), tuple(first), totals), both, tuple(second)


def as_it_is(source: int, target: int, nbytes: int) -> Copy:
    """A run of bytes."""
    return Copy(source, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")


@dataclass(frozen=True)
class WithCopy:
    """Makes the experts of one layer, each behind its copy."""

    exact: Maker
    copy: Maker
    at: int  # where the expert begins

    def __call__(self, source: Lookup, target: Lookup, expert: int) -> None:
        """Fill the run's tensors from the source's, as `Maker`."""
        self.copy(source, target, expert)
        self.exact(source, shifted(target, self.at), expert)


def with_copy(maker: Maker, low: Low) -> WithCopy | NestedMaker:
    """What makes experts and their copies, of what makes experts alone."""
    of = maker.source, low.layout, maker.transposed, maker.where
    if low.nested:
        return NestedMaker("nested", *of, low=low)
    return WithCopy(maker, Maker(low.precision, *of), low.stride)


def shifted(target: Lookup, by: int) -> Lookup:
    """Tensors so many bytes further on."""
    return lambda spec: target(replace(spec, offset=spec.offset + by))


@dataclass(frozen=True)
class NestedMaker(Maker):
    """Makes nested experts: the copy, then what it lacks. `target` is the copy's layout."""

    low: Low | None = None

    def _fill(self, name: str, target: Lookup) -> Callable[[np.ndarray, int, int, int], bool]:
        assert self.low is not None
        codes, scale = (target(spec) for spec in self.target.weight(name).parts)
        rest = shifted(target, self.low.stride)(self.low.rest[name])

        def fill(w: np.ndarray, row: int, stop: int, per: int) -> bool:
            rows = slice(row // per, stop // per)
            made = np.empty(scale[rows].shape, np.float32)
            group, planes = w.shape[1] // made.shape[1], (codes[row:stop], rest[row:stop])
            right = quantise.nested(w, group, *(plane.numpy() for plane in planes), made)
            scale[rows].copy_(torch.from_numpy(made))
            return bool(right)

        return fill


def joined(high: Tensor, rest: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, scales) of planes and the copy's scale: the reference for what slots hold."""
    codes = (nibbles(high).short() - 8) * STEP + nibbles(rest).short() - 8
    return codes.to(torch.int8), scale / STEP
