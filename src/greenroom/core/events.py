"""What the scheduler is told, and what it orders: the whole vocabulary of both drivers.

Nobody changes an event, or an action that was returned. They are not frozen, since that would take
a call a field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.core.pieces import Ints

if TYPE_CHECKING:  # it imports Numba, which the command line does not wait for
    from greenroom.core.policy import Rows, Weights

HOST = -1  # the processor beside host memory, where devices are numbered from 0


@dataclass(slots=True)
class Routed:
    """A step begins: one layer of one pass needs these experts (dense ids, ascending, distinct).

    `request` is the prompt-and-answer that the pass belongs to; `rows` are the tokens that chose
    each expert, `weights` the sums of their gate weights, where they are known: some policies look.
    `tail_weights` say how much each matters (see `gates`), where misses may be approximated. A pass
    that reads (a block of) a prompt is `prefill`. With `device_only` the host computes none.
    """

    step: int
    layer: int
    experts: Ints
    request: int = 0
    rows: Rows | None = None
    weights: Weights | None = None
    prefill: bool = False
    tail_weights: Weights | None = None
    device_only: bool = False


@dataclass(slots=True)
class Predicted:
    """These experts (dense ids) are expected in a layer when it is routed next, likeliest first.

    `certain`: the layer's router has chosen them, and its step has not begun yet.
    """

    layer: int
    experts: Ints
    certain: bool = False


@dataclass(slots=True)
class Landed:
    """A lane of a link has delivered a chunk of a piece."""

    lane: int
    piece: int
    link: int = 0


@dataclass(slots=True)
class Failed:
    """A lane of a link could not deliver a chunk of a piece."""

    lane: int
    piece: int
    link: int = 0


@dataclass(slots=True)
class Computed:
    """The group that was ordered of a device, or of `HOST`, has been computed."""

    device: int = 0


@dataclass(slots=True)
class Cancelled:
    """The step under way is given up; what is not moving yet need not come."""


@dataclass(slots=True)
class Resized:
    """There shall be this many slots from now on.

    `ahead` of them (as many as before where None) are for what is fetched before it is asked for.
    """

    capacity: int
    ahead: int | None = None


@dataclass(slots=True)
class Pinned:
    """These pieces, and no longer those of before, stay once they are there."""

    pieces: Ints


Event = Pinned | Routed | Predicted | Landed | Failed | Computed | Cancelled | Resized


@dataclass(slots=True)
class StartChunk:
    """Move chunk number `chunk` of a piece on its way to this slot, on a lane of a link.

    In a chain of links it goes by `staging_slot` (-1 with one link), or by `host_slot` of the tier
    between two links, where the piece has one. `first_of_piece`: nothing of the piece, on this way
    to its slot, has moved before. `copy_slot` is the slot of the low-precision copy that it is
    joined with (-1: none); the copy has to be copied to `slot` at once.
    """

    lane: int
    piece: int
    slot: int
    chunk: int
    link: int = 0
    staging_slot: int = -1
    demand: bool = True
    host_slot: int = -1
    first_of_piece: bool = False
    copy_slot: int = -1


@dataclass(slots=True)
class ComputeGroup:
    """Compute these experts of the step (dense ids) from these slots, in one call.

    They are all on one device; with `HOST` in its place they are computed where they wait, from
    slots of the tier between two links. Of split experts it is one part of each: 0 the top, 1 the
    bottom, which goes on where the top has ended. Where misses may be approximated it is 0 for
    exact weights, 1 for low-precision copies, 2 for experts that are left out, which have no slots.
    """

    experts: Ints
    slots: Ints
    device: int = 0
    part: int = 0


@dataclass(slots=True)
class Move:
    """Copy a resident piece from one slot to another, at once and in the order given."""

    piece: int
    source: int
    target: int


@dataclass(slots=True)
class Trim:
    """The tier has this many slots from now on; the memory of those above is free."""

    capacity: int


@dataclass(slots=True)
class Finish:
    """The step is over. `failed` is the piece that could not be had, -1 where all is computed."""

    failed: int = -1


Action = StartChunk | ComputeGroup | Move | Trim | Finish
