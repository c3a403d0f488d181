"""Cutting of an expert's matrices into segments of intermediate channels, and joining them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from greenroom.core.layout import BLOCKS, MIXED, PLAIN, Segment, SlotLayout, TensorSpec
from greenroom.errors import UnsupportedModel

BLOCK = 64  # channels: the down projection is summed in such blocks, so no bit changes


@dataclass(frozen=True, slots=True)
class Cutting:
    """The way in which the experts of a layer are cut into segments of channels.

    transposed: plain matrices have the shape [inputs, outputs]
    runs: 2 if one matrix holds the channels of the gate projection, then those of up; else 1
    layout: the slot layout of an uncut expert
    """

    transposed: bool
    runs: int
    layout: SlotLayout

    @classmethod
    def of(cls, module: nn.Module, layout: SlotLayout) -> Cutting:
        """Make the `Cutting` for an experts module, from the slot layout of its uncut experts."""
        return cls(bool(module.is_transposed), _runs(module), layout)

    @property
    def channels(self) -> int:
        """Return the size of an uncut expert's intermediate dimension."""
        rows, columns = self.layout.weight("down_proj").shape
        plain = self.layout.encodings.get("down_proj", PLAIN) == PLAIN
        return rows if plain and self.transposed else columns

    def segments(self, count: int, where: str) -> SlotLayout:
        """Make the slot layout of experts cut into at most `count` segments of similar size.

        Raises UnsupportedModel, which names the module `where`, if the experts are too small, or
        if no cut fits their quantization scales.
        """
        unit, channels = self._unit(where), self.channels
        blocks = -(-channels // unit)
        if blocks < 2:
            raise UnsupportedModel(
                f"the experts of {where} have {channels} intermediate channels: an expert can be"
                f" split only at multiples of {unit} channels, so they cannot be split"
            )
        count = min(count, blocks)
        ends = [min(round(k * blocks / count) * unit, channels) for k in range(count + 1)]
        segments, offset = [], 0
        for first, end in pairwise(ends):
            specs = [(s.name, self._shape(s, first, end), s.dtype) for s in self.layout.tensors]
            layout = SlotLayout.pack(specs, self.layout.encodings, self.layout.dtype)
            segments.append(Segment(first, offset, layout))
            offset += layout.nbytes
        uncut = self.layout
        return SlotLayout(uncut.tensors, offset, uncut.encodings, uncut.dtype, tuple(segments))

    def _unit(self, where: str) -> int:
        """Return the least multiple of 64 channels at which every expert tensor can be cut."""
        for unit in range(BLOCK, self.channels + BLOCK, BLOCK):
            if all(self._divides(spec, unit) for spec in self.layout.tensors):
                return unit
        raise UnsupportedModel(
            f"the experts of {where} cannot be split: their quantization scales do not align with"
            " the intermediate channels"
        )

    def _divides(self, spec: TensorSpec, unit: int) -> bool:
        encoding = self.layout.encodings.get(_matrix(spec.name), PLAIN)
        if encoding != PLAIN and self._is_down(spec) and unit % BLOCKS[encoding][0]:
            return False
        per = spec.shape[self._axis(spec)] // self._runs(spec)
        return unit >= self.channels or unit * per % self.channels == 0

    def cut(self, spec: TensorSpec, tensor: Tensor, first: int, end: int) -> Tensor:
        """Return the part of an uncut expert's tensor for a range of intermediate channels.

        The channels are `first` to `end` - 1.
        """
        axis, runs = self._axis(spec), self._runs(spec)
        per = tensor.shape[axis] // runs
        a, b = (n * per // self.channels for n in (first, end))
        cuts = [tensor.narrow(axis, run * per + a, b - a) for run in range(runs)]
        return cuts[0] if runs == 1 else torch.cat(cuts, axis)

    def join(self, spec: TensorSpec, parts: Sequence[Tensor]) -> Tensor:
        """Join an uncut expert's tensor from the tensors of its segments, in their order."""
        axis, runs = self._axis(spec), self._runs(spec)
        each = [part.chunk(runs, axis) for part in parts]
        return torch.cat([part[run] for run in range(runs) for part in each], axis)

    def _shape(self, spec: TensorSpec, first: int, end: int) -> tuple[int, ...]:
        axis, shape = self._axis(spec), list(spec.shape)
        shape[axis] = shape[axis] * end // self.channels - shape[axis] * first // self.channels
        return tuple(shape)

    def _is_down(self, spec: TensorSpec) -> bool:
        return _matrix(spec.name) == "down_proj"

    def _axis(self, spec: TensorSpec) -> int:
        plain = self.layout.encodings.get(_matrix(spec.name), PLAIN) == PLAIN
        return int(self._is_down(spec) != (plain and self.transposed))

    def _runs(self, spec: TensorSpec) -> int:
        mixed = MIXED in self.layout.encodings.get(_matrix(spec.name), PLAIN)
        return 1 if mixed or self._is_down(spec) else self.runs


def _matrix(name: str) -> str:
    """Return the name of the weight matrix that a tensor belongs to."""
    return name.partition(".")[0]


def _runs(module: nn.Module) -> int:
    return 2 if module.has_gate and module.is_concatenated else 1
