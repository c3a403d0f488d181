"""Home devices: the device that each expert is assigned to, and the slots of each device.

An expert's home device is a hash of its ids (MoE-Infinity, appendix B.2), so no table is needed
where the ids are known. The hash is (layer + expert) mod the number of active devices; spare ones,
which may be added to a running model, have no experts. It spreads every layer evenly;
a mixing hash would be even only over the whole model. An expert number that is popular in many
layers is not always on the same device.

If a memory is spread over several devices, slot i of a device has the number
`i * devices + device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import BudgetError, UsageError

T = TypeVar("T")


def home_devices(offsets: Sequence[int], active: Sequence[int]) -> NDArray[np.int64]:
    """Assign every expert of a model to a home device; returns the devices by dense id.

    offsets: the dense id of each layer's first expert, and the number of all experts, [layers + 1]
    active:  the devices that get experts

    UsageError if a device would have no expert.
    """
    if not 1 <= len(active) <= offsets[-1]:
        raise UsageError(f"{offsets[-1]} experts can be spread over 1 to {offsets[-1]} devices,"
                         f" not {len(active)}: give fewer devices")  # fmt: skip
    each = [layer + np.arange(b - a) for layer, (a, b) in enumerate(pairwise(offsets))]
    return np.asarray(active, np.int64)[np.concatenate(each) % len(active)]


def slots_per_device(capacity: int, experts_per_device: Sequence[int]) -> list[int]:
    """Divide cache slots among devices, in proportion to each device's experts.

    Numbers are rounded by the largest remainders. If there is a slot for every expert, each device
    gets a slot for every expert of its own. A device without experts gets no slot. BudgetError if a
    device with experts would have no slot.
    """
    total = sum(experts_per_device)
    exact = [capacity * n / total for n in experts_per_device]
    slots = [int(share) for share in exact]
    by_remainder = sorted(range(len(slots)), key=lambda d: (slots[d] - exact[d], d))
    for device in by_remainder[: capacity - sum(slots)]:
        slots[device] += 1
    active = [n for n, experts in zip(slots, experts_per_device, strict=True) if experts]
    if len(active) > 1 and min(active) < 1:
        raise BudgetError(
            f"{len(active)} devices need at least one slot each, but there are {capacity} cache"
            " slots: give the cache more memory"
        )
    return slots


def spread(chain: Sequence[T], devices: int) -> tuple[T, ...]:
    """Repeat the last of a chain of links once for each device.

    For two devices, (disk, bus) becomes (disk, bus, bus).
    """
    return (*chain[:-1], *[chain[-1]] * devices)
