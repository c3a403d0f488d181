"""Several devices: which one an expert belongs to, and how many slots each of them has.

Experts are hashed over devices by their ids (MoE-Infinity, appendix B.2), so that everybody who
knows an expert knows where it is computed, and no table is kept. The hash is the plainest one:
(layer + expert) mod devices. It is even in every layer, where a hash that mixes would be even on
the whole only, and an expert that is popular in many layers is not always on the same device.

A tier of several devices has slots `local * devices + device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import BudgetError, UsageError

T = TypeVar("T")


def homes(offsets: Sequence[int], devices: int) -> NDArray[np.int64]:
    """The home of every expert, by dense id. UsageError where a device would have none."""
    if not 1 <= devices <= offsets[-1]:
        raise UsageError(f"{offsets[-1]} experts can be spread over 1 to {offsets[-1]} devices,"
                         f" not {devices}")  # fmt: skip
    each = [layer + np.arange(b - a) for layer, (a, b) in enumerate(pairwise(offsets))]
    return np.concatenate(each) % devices


def shares(capacity: int, at_home: Sequence[int]) -> list[int]:
    """Slots of each device: in proportion to the experts `at_home` there, which are nearly alike.

    So where there is a slot for every expert, each is at its home. BudgetError where a device
    would have none.
    """
    total = sum(at_home)
    exact = [capacity * n / total for n in at_home]
    found = [int(share) for share in exact]
    by_rest = sorted(range(len(found)), key=lambda d: (found[d] - exact[d], d))
    for device in by_rest[: capacity - sum(found)]:
        found[device] += 1
    if len(found) > 1 and min(found) < 1:
        raise BudgetError(f"{len(found)} devices need a slot each, there are {capacity}")
    return found


def spread(chain: Sequence[T], devices: int) -> tuple[T, ...]:
    """A chain of links where there are several devices: the last link once for each of them."""
    return (*chain[:-1], *[chain[-1]] * devices)
