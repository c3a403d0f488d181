"""The scheduler's events and actions, in a run and in a simulation alike.

Events and actions are never modified. They are not frozen dataclasses, because the constructor of a
frozen dataclass makes a call for each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints

if TYPE_CHECKING:  # it imports Numba, which the command line does not wait for
    from greenroom.core.cache.scope import Scope
    from greenroom.core.policy import Rows, Weights

HOST = -1  # the host's processor; devices are numbered from 0


@dataclass(slots=True)
class Routed:
    """Event: one layer of a forward pass begins, and its router chose these experts.

    step:         the number of the forward pass
    experts:      dense ids (layer offset + expert number), ascending, distinct, [n]
    request:      the index of the request (a prompt with its answer) that the pass belongs to
    rows:         how many tokens chose each expert, [n]; None if the policy does not need it
    weights:      the sums of these tokens' gate weights, [n]; None if the policy does not need them
    prefill:      the pass reads (a block of) a prompt
    tail_weights: for each expert, its share of a token's gate weights and those of all lower-ranked
                  experts (see `core.gates`), [n]; None unless misses may be approximated
    device_only:  the host's processor may compute none of the experts
    computed:     ids of experts that were computed before; those in slots are not ordered again
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
    computed: frozenset[int] = frozenset()


@dataclass(slots=True)
class HostComputed:
    """Event: the host has computed experts of a step that was served without events.

    experts: their ids in the model
    seconds: of the computation; 0 if it has failed
    """

    layer: int
    experts: Sequence[int]
    seconds: float


@dataclass(slots=True)
class Predicted:
    """Event: a layer is expected to need these experts next, likeliest first.

    experts: dense ids (layer offset + expert number)
    certain: the layer's router has already chosen the experts; the layer's step has not begun yet
    distance: layers from the one after which the prediction was made, at least 1; 0: from the layer
        that was routed last
    priorities: the prefetch priority of each expert, if its predictor has an order of its own
    """

    layer: int
    experts: Ints
    certain: bool = False
    distance: int = 0
    priorities: NDArray[np.floating[Any]] | None = None


@dataclass(slots=True)
class Landed:
    """Event: a link has delivered a chunk of an expert's bytes.

    `lane` is the lane of the link that carried the chunk, and is free again.
    """

    lane: int
    piece: int
    link: int = 0


@dataclass(slots=True)
class Failed:
    """Event: a link could not deliver a chunk of an expert's bytes.

    `lane` is the lane of the link that should have carried the chunk, and is free again.
    """

    lane: int
    piece: int
    link: int = 0


@dataclass(slots=True)
class Computed:
    """Event: a processor has computed the expert group that it was given.

    `device` is the number of a device, or `HOST` for the host's processor.
    """

    device: int = 0


@dataclass(slots=True)
class Cancelled:
    """Event: the current step (one layer of a pass) is abandoned, and no more chunks start."""


@dataclass(slots=True)
class Resized:
    """Event: the expert cache gets another number of slots, another scope, or other devices.

    capacity: the new number of slots, counted in unsplit experts
    ahead:    how many slots prefetches may borrow at a time; None keeps the present number
    scope:    how layers divide the slots; None keeps the present scope
    devices:  the devices that have experts; None keeps them
    """

    capacity: int
    ahead: int | None = None
    scope: Scope | None = None
    devices: Sequence[int] | None = None


@dataclass(slots=True)
class Pinned:
    """Event: the experts in `pieces` replace those that are never evicted once resident."""

    pieces: Ints


@dataclass(slots=True)
class Idle:
    """Event: no request is computed now; the next `Routed` ends this state.

    `experts` may be read into free slots meanwhile, those most likely to be used first; dense ids.
    """

    experts: Ints


Event = (
    Pinned
    | Routed
    | HostComputed
    | Predicted
    | Landed
    | Failed
    | Computed
    | Cancelled
    | Resized
    | Idle
)


@dataclass(slots=True)
class StartChunk:
    """Action: move one chunk of an expert's bytes over a link, towards its slot.

    piece:          the unsplit expert, segment or copy that the chunk belongs to
    slot:           the slot in memory to which the piece goes
    chunk:          the number of the chunk in its piece, from 0
    staging_slot:   where the chunk waits between two links of a chain; -1 if there is one link
                    only, or the piece has a `host_slot`
    host_slot:      the piece's slot in the cache of host memory, between two links; -1: none
    demand:         a step waits for the piece; False for a prefetch
    first_of_piece: this is the first chunk of the transfer
    copy_slot:      slot of the low-precision copy that is copied to `slot` at once, if the piece is
                    the remainder that the copy lacks; -1: none
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
    """Action: compute an expert group, several experts of a step, from their slots in one call.

    experts: dense ids (layer offset + expert number), [n]
    slots:   the slot of each expert in memory, [n]
    device:  the device that holds all of them; `HOST`: the host's processor computes them from
             slots of host memory
    part:    for split experts, 0 is the top segment, and 1 the bottom segment, which continues the
             top's result; if misses may be approximated, 0 stands for exact weights, 1 for
             low-precision copies, 2 for skipped experts, which have no slots
    """

    experts: Ints
    slots: Ints
    device: int = 0
    part: int = 0


@dataclass(slots=True)
class Move:
    """Action: copy a resident expert to another slot of its memory, before any later action."""

    piece: int
    source: int
    target: int


@dataclass(slots=True)
class Trim:
    """Action: change the number of expert slots in a memory.

    `capacity` is the new number, counted in unsplit experts. The memory of slots beyond it becomes
    free.
    """

    capacity: int


@dataclass(slots=True)
class Finish:
    """Action: end the current step (one layer of a pass), which may have failed to read an expert.

    `failed` is the id of the expert, segment or copy that could not be read; -1 if there is none.
    """

    failed: int = -1


Action = StartChunk | ComputeGroup | Move | Trim | Finish
