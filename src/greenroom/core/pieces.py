"""Pieces of experts: the units in which weights are stored, moved and cached.

A piece is an unsplit expert, the top or the bottom segment of a split one, a low-precision copy, or
the remainder of an expert that such a copy lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from greenroom.core.home_devices import home_devices, slots_per_device
from greenroom.errors import UsageError

Ints = NDArray[np.int64]


# Slots for bottoms, as a multiple of top-k: those of one step, and prefetched ones of the next.
SECONDARY_SLOTS_PER_CHOICE = 2


@dataclass(frozen=True)
class Split:
    """A split of a model's experts into top segments (cached) and bottom segments (fetched).

    Tops may stay resident, bottoms are fetched when needed.

    tops, bottoms: bytes of each, by layer; a layer with bottoms of 0 bytes is not split
    secondary_slots: slots for bottoms, each as large as the largest
    """

    tops: tuple[int, ...]
    bottoms: tuple[int, ...]
    secondary_slots: int

    def __post_init__(self) -> None:
        if not any(self.bottoms):
            raise UsageError("no layer is split: leave out the split")
        if min(self.tops) < 1 or min(self.bottoms) < 0:
            raise UsageError("a top has at least a byte, a bottom none or more")
        if self.secondary_slots < 1:
            raise UsageError(f"bottom segments need at least one slot, got {self.secondary_slots}")

    @classmethod
    def of(
        cls, nbytes: int, shares: float | Sequence[float], layers: int, secondary_slots: int
    ) -> Split:
        """Make a split of a model's experts by each layer's share, rounded to eighths.

        The experts have `nbytes`.
        """
        each = [shares] * layers if isinstance(shares, float) else list(shares)
        if len(each) != layers:
            raise UsageError(f"the split has {len(each)} numbers, the model has {layers} layers")
        tops = tuple(nbytes * min(8, max(1, round(8 * share))) // 8 for share in each)
        return cls(tops, tuple(nbytes - top for top in tops), secondary_slots)

    @property
    def unsplit_bytes(self) -> int:
        """Return the bytes of a slot that fits any unsplit expert.

        Capacities are counted in such slots.
        """
        return max(a + b for a, b in zip(self.tops, self.bottoms, strict=True))

    @property
    def reserved(self) -> int:
        """Return the bytes of all slots for bottom segments of split experts."""
        return self.secondary_slots * max(self.bottoms)


@dataclass(frozen=True)
class Copies:
    """Low-precision copies of a model's experts, which are stored in addition to the experts.

    exact, low: bytes of an expert and of its copy, by layer
    remainder: bytes of an expert that its copy lacks, by layer; empty unless copies are nested
    secondary_slots: slots for copies, each as large as the largest
    """

    exact: tuple[int, ...]
    low: tuple[int, ...]
    remainder: tuple[int, ...]
    secondary_slots: int

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.low, self.exact, strict=True)):
            raise UsageError("a low-precision copy must be smaller than its expert")
        if self.secondary_slots < 1:
            raise UsageError(
                f"low-precision copies need at least one slot, got {self.secondary_slots}"
            )

    @classmethod
    def of(
        cls, nbytes: int, share: float, layers: int, secondary_slots: int, *, nested: bool
    ) -> Copies:
        """Describe low-precision copies that take a given share of their experts' bytes.

        The experts have `nbytes`.
        """
        low = max(1, round(nbytes * share))
        remainder = (nbytes - low,) * layers if nested else ()
        return cls((nbytes,) * layers, (low,) * layers, remainder, secondary_slots)

    @property
    def reserved(self) -> int:
        """Return how many slots of exact experts the low-precision copies take the memory of."""
        return -(-self.secondary_slots * max(self.low) // max(self.exact))


@dataclass(frozen=True)
class Pieces:
    """The pieces of all of a model's experts: layer, bytes and chunks of each.

    Under dense ids.

    The first pieces have the experts' ids: unsplit and exact experts, or tops. A bottom or a
    low-precision copy of each comes next; then, where copies are nested, the remainder of each. The
    slot of piece `id` is on device `home_device[id]`, one of `devices`.
    """

    offsets: tuple[int, ...]
    layer: Ints
    nbytes: Ints
    chunks: Ints
    home_device: Ints
    devices: int = 1
    split: Split | None = None
    copies: Copies | None = None

    @classmethod
    def unsplit(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        chunks: Sequence[int] | None = None,
        devices: int = 1,
    ) -> Pieces:
        """Make the pieces of unsplit experts: one piece for each expert.

        So piece ids are expert ids.

        `offsets` has layers + 1 entries; `nbytes[layer]` is an expert's size; `chunks[piece]` is
        the number of a piece's transfers (default: 1).
        """
        return cls._of(offsets, (nbytes,), chunks, devices)

    @classmethod
    def with_split(
        cls, offsets: Sequence[int], split: Split, chunks: Sequence[int] | None = None
    ) -> Pieces:
        """Make the pieces of split experts on one device: top and bottom segments.

        `chunks` as in `unsplit`.
        """
        return replace(cls._of(offsets, (split.tops, split.bottoms), chunks), split=split)

    @classmethod
    def with_copies(
        cls, offsets: Sequence[int], copies: Copies, chunks: Sequence[int] | None = None
    ) -> Pieces:
        """Make the pieces of exact experts and low-precision copies, on one device.

        `chunks` as in `unsplit`.
        """
        kinds = (copies.exact, copies.low, copies.remainder)[: 3 if copies.remainder else 2]
        return replace(cls._of(offsets, kinds, chunks), copies=copies)

    @classmethod
    def _of(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[Sequence[int]],
        chunks: Sequence[int] | None,
        devices: int = 1,
    ) -> Pieces:
        """Make pieces of several kinds, of which every expert has one each.

        `nbytes[kind][layer]`.
        """
        layer = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        ones = np.ones(len(nbytes) * layer.size, np.int64)
        return cls(
            offsets=tuple(offsets),
            layer=np.tile(layer, len(nbytes)),
            nbytes=np.asarray(nbytes, np.int64)[:, layer].ravel(),
            chunks=np.asarray(ones if chunks is None else chunks, np.int64),
            home_device=np.tile(home_devices(offsets, devices), len(nbytes)),
            devices=devices,
        )

    @property
    def experts(self) -> int:
        """Return the number of a model's experts.

        An expert's id is that of its first piece.
        """
        return self.offsets[-1]

    @property
    def primary(self) -> Pieces:
        """Return the pieces that an eviction policy manages, one for each expert.

        Unsplit and exact experts, or tops.
        """
        n = self.experts
        return replace(
            self, layer=self.layer[:n], nbytes=self.nbytes[:n], chunks=self.chunks[:n],
            home_device=self.home_device[:n],
        )  # fmt: skip

    def secondary_of(self, expert: int) -> int:
        """Return the id of an expert's bottom segment or low-precision copy.

        -1 where it has none.
        """
        piece = self.experts + expert
        return piece if piece < len(self) and self.nbytes[piece] else -1

    def slots_per_device(self, capacity: int) -> list[int]:
        """Divide a number of cache slots among devices, by their experts.

        `capacity` slots in all. BudgetError where a device would have none.
        """
        if self.devices == 1:
            return [capacity]
        return slots_per_device(
            capacity, np.bincount(self.home_device, minlength=self.devices).tolist()
        )

    @property
    def layers(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.layer.size
