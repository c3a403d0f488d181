"""Make low-precision copies beside their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from greenroom.core.layout import SlotLayout
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.pack.low import NESTED, Low, nested_layout
from greenroom.hf.pack import quantise
from greenroom.hf.pack.target import Lookup, Maker, target_layout


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
