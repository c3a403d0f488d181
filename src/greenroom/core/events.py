"""What the scheduler is told, and what it orders: the whole vocabulary of both drivers."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.pieces import Ints
from greenroom.core.policy import Rows, Weights


@dataclass(frozen=True, slots=True)
class Routed:
    """A step begins: one layer of one pass needs these experts (dense ids, ascending, distinct).

    `request` is the prompt-and-answer that the pass belongs to; `rows` are the tokens that chose
    each expert, `weights` the sums of their gate weights, where they are known: some policies look.
    """

    step: int
    layer: int
    experts: Ints
    request: int = 0
    rows: Rows | None = None
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """A lane has delivered a chunk of a piece."""

    lane: int
    piece: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A lane could not deliver a chunk of a piece."""

    lane: int
    piece: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The wave that was ordered has been computed."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The step under way is given up; what is not moving yet need not come."""


@dataclass(frozen=True, slots=True)
class Resized:
    """The cache shall have this many slots from now on."""

    capacity: int


Event = Routed | Landed | Failed | Computed | Cancelled | Resized


@dataclass(frozen=True, slots=True)
class StartChunk:
    """Move chunk number `chunk` of a piece into its slot, on this lane."""

    lane: int
    piece: int
    slot: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute these experts of the step (dense ids) from these slots, in one call."""

    experts: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a resident piece from one slot to another, at once and in the order given."""

    piece: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Trim:
    """The tier has this many slots from now on; the memory of those above is free."""

    capacity: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The step is over. `failed` is the piece that could not be had, -1 where all is computed."""

    failed: int = -1


Action = StartChunk | Compute | Move | Trim | Finish
