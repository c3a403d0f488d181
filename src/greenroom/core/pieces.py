"""Pieces: what is stored, moved and kept.

A piece is (expert, part, precision). An expert can be computed when the pieces of one of its
variants are resident; a whole expert in its stored precision is the first variant, of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.homes import homes, shares

Ints = NDArray[np.int64]


class Piece(NamedTuple):
    """`expert` is the dense id `offsets[layer] + expert`."""

    expert: int
    part: str = "whole"
    precision: str = "stored"


@dataclass(frozen=True)
class Pieces:
    """All pieces of a model under dense ids: `table[id]`, and their layer, bytes and chunks by id.

    `variants[expert]` lists, best first, the sets of piece ids that suffice to compute an expert.
    `home[id]` is the device that the piece is moved to and kept on, of so many `devices`.
    """

    table: tuple[Piece, ...]
    offsets: tuple[int, ...]
    layer: Ints
    nbytes: Ints
    chunks: Ints
    variants: tuple[tuple[tuple[int, ...], ...], ...]
    home: Ints
    devices: int = 1

    @classmethod
    def whole(
        cls,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        chunks: Sequence[int] | None = None,
        devices: int = 1,
    ) -> Pieces:
        """One piece an expert, so that piece ids are expert ids.

        `offsets` has layers + 1 entries; `nbytes[layer]` is an expert's size; `chunks[expert]` says
        in how many transfers an expert comes (one each where it is not given).
        """
        counts = [b - a for a, b in pairwise(offsets)]
        experts = offsets[-1]
        layer = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        return cls(
            table=tuple(Piece(e) for e in range(experts)),
            offsets=tuple(offsets),
            layer=layer,
            nbytes=np.asarray(nbytes, np.int64)[layer],
            chunks=np.ones(experts, np.int64) if chunks is None else np.asarray(chunks, np.int64),
            variants=tuple(((e,),) for e in range(experts)),
            home=homes(offsets, devices),
            devices=devices,
        )

    def shares(self, capacity: int) -> list[int]:
        """Slots of each device, of so many on all of them. BudgetError where one has none."""
        if self.devices == 1:
            return [capacity]
        return shares(capacity, np.bincount(self.home, minlength=self.devices).tolist())

    @property
    def layers(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return len(self.table)
