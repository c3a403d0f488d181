"""Pieces of experts: the units in which weights are stored, moved and cached.

A piece is an unsplit expert, the top or the bottom segment of a split expert, a low-precision copy,
or the remainder of an expert: the bytes that its low-precision copy lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from greenroom.core.config.base import EXPERTS
from greenroom.core.home_devices import home_devices, slots_per_device
from greenroom.errors import UsageError

Ints = NDArray[np.int64]


# Slots for bottoms, as a multiple of top-k: those of one step, and prefetched ones of the next.
SECONDARY_SLOTS_PER_CHOICE = 2


@dataclass(frozen=True)
class Split:
    """A split of a model's experts into top segments (cached) and bottom segments (fetched).

    Top segments may stay resident, bottom segments are fetched when they are needed.

    tops, bottoms:   for each layer, the size in bytes of an expert's top and bottom segment; a
                     layer whose bottom segments have 0 bytes is not split
    secondary_slots: the number of slots for bottom segments, each as large as the largest segment

    UsageError if no layer is split, or a number is too small.
    """

    tops: tuple[int, ...]
    bottoms: tuple[int, ...]
    secondary_slots: int

    def __post_init__(self) -> None:
        if not any(self.bottoms):
            raise UsageError(
                "--split leaves the experts of every layer unsplit:"
                " give a share below 1, or no --split"
            )
        if min(self.tops) < 1 or min(self.bottoms) < 0:
            raise UsageError(
                "a top segment must have at least 1 byte and a bottom segment at least 0 bytes,"
                f" got a top segment of {min(self.tops)} and a bottom segment of"
                f" {min(self.bottoms)} bytes"
            )
        if self.secondary_slots < 1:
            raise UsageError(
                f"the cache of bottom segments has {self.secondary_slots} slots: it needs at least"
                " 1; give the expert cache more memory"
            )

    @classmethod
    def of(
        cls, nbytes: int, shares: float | Sequence[float], layers: int, secondary_slots: int
    ) -> Split:
        """Make a split of a model's experts by each layer's share, rounded to eighths.

        nbytes: the size of an expert
        shares: the share of an expert that is its top segment, one for all layers, or one for each;
                a share below one eighth becomes one eighth

        UsageError if there is not one share for each layer, or no layer is split.
        """
        each = [shares] * layers if isinstance(shares, float) else list(shares)
        if len(each) != layers:
            raise UsageError(
                f"--split has {len(each)} numbers, but the model has {layers} layers:"
                " give one number, or one for each layer"
            )
        tops = tuple(nbytes * min(8, max(1, round(8 * share))) // 8 for share in each)
        return cls(tops, tuple(nbytes - top for top in tops), secondary_slots)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the share of an expert in its top segment, for each layer."""
        return tuple(a / (a + b) for a, b in zip(self.tops, self.bottoms, strict=True))

    @property
    def unsplit_bytes(self) -> int:
        """Return the size in bytes of a slot that fits any unsplit expert.

        Cache capacities are counted in such slots.
        """
        return max(a + b for a, b in zip(self.tops, self.bottoms, strict=True))

    @property
    def reserved(self) -> int:
        """Return the total size in bytes of the slots for bottom segments of split experts."""
        return self.secondary_slots * max(self.bottoms)


@dataclass(frozen=True)
class Copies:
    """Low-precision copies of a model's experts, which are stored in addition to the experts.

    exact, low:      for each layer, the size in bytes of an expert and of its copy
    remainder:       for each layer, how many bytes of an expert its copy lacks; empty unless
                     copies are nested: each copy is a part of its expert's own bytes
    secondary_slots: the number of slots for copies, each as large as the largest copy

    UsageError if a copy is not smaller than its expert, or there are no slots.
    """

    exact: tuple[int, ...]
    low: tuple[int, ...]
    remainder: tuple[int, ...]
    secondary_slots: int

    def __post_init__(self) -> None:
        for low, exact in zip(self.low, self.exact, strict=True):
            if low >= exact:
                raise UsageError(
                    "a low-precision copy must be smaller than its expert,"
                    f" got {low} bytes for an expert of {exact} bytes"
                )
        if self.secondary_slots < 1:
            raise UsageError(
                f"the cache of low-precision copies has {self.secondary_slots} slots: it needs at"
                " least 1; give the expert cache more memory, or a higher --low-share"
            )

    @classmethod
    def of(
        cls, nbytes: int, share: float, layers: int, secondary_slots: int, *, nested: bool
    ) -> Copies:
        """Describe low-precision copies that take a given share of their experts' bytes.

        nbytes: the size of an expert
        nested: a copy is a part of its expert's own bytes
        """
        low = max(1, round(nbytes * share))
        remainder = (nbytes - low,) * layers if nested else ()
        return cls((nbytes,) * layers, (low,) * layers, remainder, secondary_slots)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a model's experts (experts, segments, copies): layer, bytes, chunks of each.

    offsets:     the dense id of each layer's first expert, and the number of experts, [layers + 1]
    layer:       the layer of each piece
    nbytes:      the size of each piece
    chunks:      the number of chunks in which each piece is transferred
    home_device: the device on which each piece has its slot, of `devices` devices; some may be
                 spare, and a running cache can change them (`Placement`)
    placement:   whether the experts of each layer are spread over devices, or layers are
                 (`home_devices`)

    Pieces 0 to experts - 1 have the experts' dense ids: unsplit or exact experts, or top segments.
    Then follows the bottom segment or the low-precision copy of each expert, if experts are split
    or have copies; then, if copies are nested, the remainder of each expert.
    """

    offsets: tuple[int, ...]
    layer: Ints
    nbytes: Ints
    chunks: Ints
    home_device: Ints
    devices: int = 1
    placement: str = EXPERTS
    split: Split | None = None
    copies: Copies | None = None

    @classmethod
    def unsplit(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        chunks: Sequence[int] | None = None,
        devices: int = 1,
        active: Sequence[int] | None = None,
        placement: str = EXPERTS,
    ) -> Pieces:
        """Make the pieces of a model whose experts are not split: one piece for each expert.

        offsets: the dense id of each layer's first expert, and the number of experts, [layers + 1]
        nbytes:  the size of an expert, by layer
        chunks:  the number of transfers of each piece (default: 1)
        active:  the devices that have experts (default: all)
        placement: of experts on devices (see `home_devices`)

        A piece has the id of its expert.
        """
        return cls._of(offsets, (nbytes,), chunks, devices, active, placement)

    @classmethod
    def with_split(
        cls,
        offsets: Sequence[int],
        split: Split,
        chunks: Sequence[int] | None = None,
        devices: int = 1,
        active: Sequence[int] | None = None,
        placement: str = EXPERTS,
    ) -> Pieces:
        """Make the pieces of a model with split experts: top and bottom segments.

        See `unsplit` for the other arguments.
        """
        of = cls._of(offsets, (split.tops, split.bottoms), chunks, devices, active, placement)
        return replace(of, split=split)

    @classmethod
    def with_copies(
        cls,
        offsets: Sequence[int],
        copies: Copies,
        chunks: Sequence[int] | None = None,
        devices: int = 1,
        active: Sequence[int] | None = None,
        placement: str = EXPERTS,
    ) -> Pieces:
        """Make the pieces of a model with low-precision copies: experts and copies.

        See `unsplit` for the other arguments.
        """
        kinds = (copies.exact, copies.low, copies.remainder)[: 3 if copies.remainder else 2]
        return replace(cls._of(offsets, kinds, chunks, devices, active, placement), copies=copies)

    @classmethod
    def _of(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[Sequence[int]],
        chunks: Sequence[int] | None,
        devices: int = 1,
        active: Sequence[int] | None = None,
        placement: str = EXPERTS,
    ) -> Pieces:
        """Make pieces of several kinds, one of each kind for every expert.

        `nbytes[kind][layer]` is the size of a piece.
        """
        layer = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        ones = np.ones(len(nbytes) * layer.size, np.int64)
        home = home_devices(offsets, active or range(devices), placement)
        return cls(
            offsets=tuple(offsets),
            layer=np.tile(layer, len(nbytes)),
            nbytes=np.asarray(nbytes, np.int64)[:, layer].ravel(),
            chunks=np.asarray(ones if chunks is None else chunks, np.int64),
            home_device=np.tile(home, len(nbytes)),
            devices=devices,
            placement=placement,
        )

    @property
    def experts(self) -> int:
        """Return the number of a model's experts, in all layers."""
        return self.offsets[-1]

    @property
    def primary(self) -> Pieces:
        """Return the ids that an eviction policy manages: one piece of each expert.

        A piece is here an unsplit or exact expert, or the top segment of a split expert.
        """
        n = self.experts
        return replace(
            self, layer=self.layer[:n], nbytes=self.nbytes[:n], chunks=self.chunks[:n],
            home_device=self.home_device[:n],
        )  # fmt: skip

    def secondary_of(self, expert: int) -> int:
        """Return the id of an expert's bottom segment or low-precision copy; -1 if it has none."""
        piece = self.experts + expert
        return piece if piece < len(self) and self.nbytes[piece] else -1

    def slots_per_device(self, capacity: int, active: Sequence[int] | None = None) -> list[int]:
        """Divide a number of cache slots among devices, in proportion to each device's experts.

        A device without experts gets none. `active` are the devices with experts, in place of the
        present ones. BudgetError if one of them would get none.
        """
        if self.devices == 1:
            return [capacity]
        if active is not None:
            return self.on_devices(active).slots_per_device(capacity)
        return slots_per_device(capacity, self.experts_per_device)

    @property
    def secondary_slots(self) -> list[int]:
        """The number of slots for bottom segments or low-precision copies on each device.

        Each device with experts has at least one, if there are any.
        """
        if (parts := self.split or self.copies) is None:
            return [0] * self.devices
        return self.slots_per_device(max(parts.secondary_slots, len(self.active_devices)))

    @property
    def active_devices(self) -> list[int]:
        """Return the devices that have experts, ascending."""
        return np.flatnonzero(self.experts_per_device).tolist()

    @property
    def experts_per_device(self) -> list[int]:
        """Return the number of experts of each device; 0 for a spare one."""
        counts = np.bincount(self.home_device[: self.experts], minlength=self.devices)
        return [int(n) for n in counts]

    def on_devices(self, active: Sequence[int]) -> Pieces:
        """Return the same pieces with home devices among `active`, which get all experts.

        UsageError for a number of devices that cannot have all experts.
        """
        home = home_devices(self.offsets, active, self.placement)
        return replace(self, home_device=np.tile(home, len(self) // self.experts))

    @property
    def equal_devices(self) -> Fraction:
        """Return how many devices, each with the largest one's share, would have all experts.

        Memory for n slots on each device is enough for n times as many slots in all. The number is
        a fraction where some devices have a layer more than others.
        """
        if self.placement == EXPERTS:
            return Fraction(len(self.active_devices))
        return Fraction(self.experts, max(self.experts_per_device))

    def layers_beside(self, layer: int) -> int:
        """Count the layers whose experts are on the same devices as a layer's."""
        if self.placement == EXPERTS:
            return self.layers
        home = self.home_device[list(self.offsets[:-1])]
        return int((home == home[layer]).sum())

    @property
    def layers(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.layer.size
