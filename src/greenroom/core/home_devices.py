"""Home devices: the device that each expert belongs to, and the slots of each device.

An expert's home device is a hash of its ids (MoE-Infinity, appendix B.2), so it is known wherever
the ids are, without a table. The hash is (layer + expert) mod devices. It spreads every layer
evenly, where a mixing hash would be even over the whole model only, and an expert number that is
popular in many layers is not always on the same device.

The slots of a tier with several devices are numbered `local * devices + device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import BudgetError, UsageError

T = TypeVar("T")


def home_devices(offsets: Sequence[int], devices: int) -> NDArray[np.int64]:
    """Assign every expert to a home device, by dense id.

    UsageError where a device would have none.
    """
    if not 1 <= devices <= offsets[-1]:
        raise UsageError(f"{offsets[-1]} experts can be spread over 1 to {offsets[-1]} devices,"
                         f" not {devices}")  # fmt: skip
    each = [layer + np.arange(b - a) for layer, (a, b) in enumerate(pairwise(offsets))]
    return np.concatenate(each) % devices


def slots_per_device(capacity: int, experts_per_device: Sequence[int]) -> list[int]:
    """Divide cache slots among devices, in proportion to each device's experts.

    A capacity of all experts gives each device a slot for every expert of its own. BudgetError
    where a device would have no slot.
    """
    total = sum(experts_per_device)
    exact = [capacity * n / total for n in experts_per_device]
    slots = [int(share) for share in exact]
    by_remainder = sorted(range(len(slots)), key=lambda d: (slots[d] - exact[d], d))
    for device in by_remainder[: capacity - sum(slots)]:
        slots[device] += 1
    if len(slots) > 1 and min(slots) < 1:
        raise BudgetError(
            f"{len(slots)} devices need at least one slot each, but there are {capacity}"
        )
    return slots


def spread(chain: Sequence[T], devices: int) -> tuple[T, ...]:
    """Repeat the last link of a chain of links for each of several devices."""
    return (*chain[:-1], *[chain[-1]] * devices)
