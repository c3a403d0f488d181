"""Home devices: the device that each expert is assigned to, and the slots of each device.

There are two placements. Spare devices, which may be added to a running model, have no experts.

experts: The experts of each layer are spread. An expert's home device is a hash of its ids
         (MoE-Infinity, appendix B.2): (layer + expert) mod the number of active devices. It spreads
         every layer evenly; a mixing hash would be even only over the whole model. An expert number
         that is popular in many layers is not always on the same device.
layers:  Each device has all experts of some consecutive layers, about as many as any other device.

If a memory is spread over several devices, slot i of a device has the number
`i * devices + device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.core.config.base import EXPERTS, LAYERS
from greenroom.errors import BudgetError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """A placement of experts on several devices (`home_devices`), and the reason for it.

    seconds: estimated times of a token's experts in all layers, with this placement and with the
             other one; empty if it was not chosen by them
    unknown: why there is no estimate; "" if there is one, or the user has named the placement
    """

    name: str = EXPERTS
    seconds: tuple[float, ...] = ()
    unknown: str = ""

    def __str__(self) -> str:
        if self.unknown:
            return f"{self.short}, since {self.unknown}"
        if not self.seconds:
            return self.short
        ours, other = (f"{seconds * 1e3:.3g}" for seconds in self.seconds)
        what = "spread" if self.name == LAYERS else "in whole layers"
        return f"{self.short}: a token's experts take about {ours} ms, {what} {other} ms"

    @property
    def short(self) -> str:
        """Describe the placement without its reason."""
        return "whole layers on each GPU" if self.name == LAYERS else "layers' experts spread"


SPREAD = DevicePlacement()


def home_devices(
    offsets: Sequence[int], active: Sequence[int], placement: str = EXPERTS
) -> NDArray[np.int64]:
    """Assign every expert of a model to a home device; returns the devices by dense id.

    offsets:   the dense id of each layer's first expert, and the number of all experts
    active:    the devices that get experts
    placement: experts (those of each layer are spread) or layers (each is on one device)

    UsageError if a device would have no expert.
    """
    if placement == LAYERS:
        return np.asarray(active, np.int64)[_device_of_layer(offsets, len(active))].repeat(
            np.diff(offsets)
        )
    if not 1 <= len(active) <= offsets[-1]:
        raise UsageError(f"{offsets[-1]} experts can be spread over 1 to {offsets[-1]} devices,"
                         f" not {len(active)}: give fewer devices")  # fmt: skip
    each = [layer + np.arange(b - a) for layer, (a, b) in enumerate(pairwise(offsets))]
    return np.asarray(active, np.int64)[np.concatenate(each) % len(active)]


def _device_of_layer(offsets: Sequence[int], devices: int) -> list[int]:
    """Divide layers into one range for each device, with about equally many experts each.

    A layer is on the device in whose share of all experts its middle lies. Devices without such a
    layer get one from their neighbours.
    """
    layers = len(offsets) - 1
    if not 1 <= devices <= layers:
        raise UsageError(
            f"{layers} MoE layers can be placed on 1 to {layers} devices, not {devices}: give fewer"
            " devices, or --device-placement experts"
        )
    homes: list[int] = []
    for layer, (begin, end) in enumerate(pairwise(offsets)):
        device = (begin + end) * devices // (2 * offsets[-1])
        most = homes[-1] + 1 if homes else 0
        homes.append(min(max(device, devices - layers + layer), most))
    return homes


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
