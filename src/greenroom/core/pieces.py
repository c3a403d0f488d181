"""Pieces: what is stored, moved and kept.

A piece is a whole expert, the top or the bottom segment of one, a low-precision copy, or what such
a copy lacks of its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from greenroom.core.home_devices import home_devices, slots_per_device
from greenroom.errors import UsageError

Ints = NDArray[np.int64]


# For bottoms, as a multiple of top-k: slots of one step, and slots of what is fetched for the next.
SECONDARY_SLOTS_PER_CHOICE = 2


@dataclass(frozen=True)
class Split:
    """How the experts of a model are cut in two: a top that may stay, a bottom that is fetched.

    tops, bottoms: bytes of each, by layer; a bottom of 0 bytes is none, its experts stay whole
    seats:         slots for bottoms, each as large as the largest
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
            raise UsageError(f"bottoms need at least one slot, got {self.secondary_slots}")

    @classmethod
    def of(
        cls, nbytes: int, shares: float | Sequence[float], layers: int, secondary_slots: int
    ) -> Split:
        """Experts of so many bytes, cut at the eighth that is nearest to each layer's share."""
        each = [shares] * layers if isinstance(shares, float) else list(shares)
        if len(each) != layers:
            raise UsageError(f"the split has {len(each)} numbers, the model has {layers} layers")
        tops = tuple(nbytes * min(8, max(1, round(8 * share))) // 8 for share in each)
        return cls(tops, tuple(nbytes - top for top in tops), secondary_slots)

    @property
    def unsplit_bytes(self) -> int:
        """Bytes of a slot that any whole expert would fit: what capacities are counted in."""
        return max(a + b for a, b in zip(self.tops, self.bottoms, strict=True))

    @property
    def reserved(self) -> int:
        """Bytes of the slots for bottoms."""
        return self.secondary_slots * max(self.bottoms)


@dataclass(frozen=True)
class Copies:
    """Low-precision copies beside the exact experts of a model.

    exact, low: bytes of an expert and of its copy, by layer
    rest:       by layer what the copy lacks of the expert, where the two are nested; else empty
    seats:      slots for copies, each as large as the largest
    """

    exact: tuple[int, ...]
    low: tuple[int, ...]
    rest: tuple[int, ...]
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
        """Experts of so many bytes, whose copies take this share of them."""
        low = max(1, round(nbytes * share))
        rest = (nbytes - low,) * layers if nested else ()
        return cls((nbytes,) * layers, (low,) * layers, rest, secondary_slots)

    @property
    def reserved(self) -> int:
        """Slots of whole experts whose memory the copies have."""
        return -(-self.secondary_slots * max(self.low) // max(self.exact))


@dataclass(frozen=True)
class Pieces:
    """All pieces of a model under dense ids: their layer, bytes and chunks by id.

    The first pieces have the experts' ids: whole and exact experts, or their tops. Then comes a
    bottom or a low-precision copy of each, then, where copies are nested, what each copy lacks.
    `home[id]` is the device that the piece is moved to and kept on, of so many `devices`.
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
        """One piece an expert, so that piece ids are expert ids.

        `offsets` has layers + 1 entries; `nbytes[layer]` is an expert's size; `chunks[piece]` says
        in how many transfers a piece comes (one each where it is not given).
        """
        return cls._of(offsets, (nbytes,), chunks, devices)

    @classmethod
    def with_split(
        cls, offsets: Sequence[int], split: Split, chunks: Sequence[int] | None = None
    ) -> Pieces:
        """A top and a bottom of each expert, on one device; `chunks` as in `unsplit`."""
        return replace(cls._of(offsets, (split.tops, split.bottoms), chunks), split=split)

    @classmethod
    def with_copies(
        cls, offsets: Sequence[int], copies: Copies, chunks: Sequence[int] | None = None
    ) -> Pieces:
        """The exact experts and their copies, on one device; `chunks` as in `unsplit`."""
        kinds = (copies.exact, copies.low, copies.rest)[: 3 if copies.rest else 2]
        return replace(cls._of(offsets, kinds, chunks), copies=copies)

    @classmethod
    def _of(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[Sequence[int]],
        chunks: Sequence[int] | None,
        devices: int = 1,
    ) -> Pieces:
        """Pieces of several kinds, each of which every expert has; `nbytes[kind][layer]`."""
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
        """How many experts there are; their ids are those of their first pieces."""
        return self.offsets[-1]

    @property
    def primary(self) -> Pieces:
        """The pieces that a policy decides about: whole and exact experts, or their tops."""
        n = self.experts
        return replace(
            self, layer=self.layer[:n], nbytes=self.nbytes[:n], chunks=self.chunks[:n],
            home_device=self.home_device[:n],
        )  # fmt: skip

    def secondary_of(self, expert: int) -> int:
        """The piece that is an expert's bottom segment or its copy; -1 where it has none."""
        extra = self.experts + expert
        return extra if extra < len(self) and self.nbytes[extra] else -1

    def slots_per_device(self, capacity: int) -> list[int]:
        """Slots of each device, of so many on all of them. BudgetError where one has none."""
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
