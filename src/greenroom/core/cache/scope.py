"""Scopes of the cache: which layers share slots, and how many slots each layer has.

`shared` is one pool for all layers. `per-layer` ("-Dist" in papers) gives each layer the same
number of slots. A tuple of numbers, one for each layer, divides the slots in proportion to them; if
the numbers add up to all slots, each layer gets exactly its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenroom.core.config.shares import SCOPES
from greenroom.core.pieces import Copies, Pieces, Split
from greenroom.errors import BudgetError, UnknownName, UsageError

Scope: TypeAlias = str | tuple[float, ...]
Floats = NDArray[np.float64]


def check_scope(scope: Scope, layers: int) -> None:
    """Check a cache's scope: a name, or one number of slots or share for each layer.

    UnknownName for another name; UsageError unless there are `layers` numbers above 0.
    """
    if isinstance(scope, str):
        if scope not in SCOPES:
            raise UnknownName("scope", scope, SCOPES)
    elif len(scope) != layers:
        raise UsageError(
            f"--scope has {len(scope)} numbers, but the model has {layers} layers: give one number"
            " for each layer"
        )
    elif min(scope) <= 0:
        raise UsageError(f"--scope must have numbers above 0, got {min(scope):g}")


def name_of(scope: Scope) -> str:
    """Return the name of a cache scope, as results show it.

    It is "given" if the scope has a number for each layer.
    """
    return scope if isinstance(scope, str) else "given"


def split_capacity(
    capacity: int, layers: int, scope: Scope, most: Sequence[int] | None = None
) -> list[int]:
    """Divide a cache's slots into slot groups: one for all layers, or one for each layer.

    scope: "shared" gives one group. "per-layer" gives each layer capacity // layers slots, and one
           more to the first capacity % layers. Numbers divide the slots in proportion to them; each
           layer then gets at least one slot, and at most its number in `most`
    most:  the experts of each layer; None: no limit

    BudgetError if a slot group would have no slot.
    """
    check_scope(scope, layers)
    if capacity < 1:
        raise BudgetError(
            f"the expert cache needs at least one slot, got {capacity}: give it more memory"
        )
    if scope == "shared":
        return [capacity]
    if capacity < layers:
        raise BudgetError(
            f"--scope {scope if isinstance(scope, str) else 'N,N,...'} needs a cache slot for each"
            f" of {layers} layers, got {capacity}: give the cache more memory, or --scope shared"
        )
    if scope == "per-layer":
        return [capacity // layers + (i < capacity % layers) for i in range(layers)]
    assert not isinstance(scope, str)
    return proportional(capacity, scope, most or [capacity] * layers)


def least_capacity(pieces: Pieces, scope: Scope) -> int:
    """Return the smallest capacity of a cache whose layers share slots by a given scope.

    It is counted in unsplit experts, and includes the memory of bottom segments or low-precision
    copies. Each slot group then has at least one slot.
    """
    check_scope(scope, pieces.layers)
    if pieces.split is None:
        for_copies = _slots_for_copies(pieces, pieces.copies) if pieces.copies is not None else 0
        groups = len(pieces.active_devices)
        if scope != "shared":  # each device has a group for each layer that it has experts of
            groups = np.unique(pieces.layer * pieces.devices + pieces.home_device).size
        return groups + for_copies
    tops = pieces.split.tops
    least = max(tops) if scope == "shared" else sum(tops)
    # A device's memory is in proportion to its experts.
    least = -(-least * pieces.experts // min(filter(None, pieces.experts_per_device)))
    reserved = _bytes_for_bottoms(pieces, pieces.split)
    return -(-(least + reserved) // pieces.split.unsplit_bytes)


def _bytes_for_bottoms(pieces: Pieces, split: Split) -> int:
    """Return the bytes of all slots for bottom segments, as many on each device as on any."""
    return len(pieces.active_devices) * max(pieces.secondary_slots) * max(split.bottoms)


def _slots_for_copies(pieces: Pieces, copies: Copies) -> int:
    """Return the size of all slots for low-precision copies, counted in exact experts."""
    nbytes = max(pieces.secondary_slots) * max(copies.low)
    return len(pieces.active_devices) * -(-nbytes // max(copies.exact))


def top_slots(pieces: Pieces, split: Split, capacity: int, scope: Scope) -> list[int]:
    """Count the slots for top segments of split experts in each slot group.

    Slot groups are in the order of their devices.

    capacity: the cache's memory, counted in unsplit experts; bottom segments take a fixed part of
              it. Each device has a share in proportion to its experts

    No slot group has more slots than experts. What a layer's memory leaves beyond its last whole
    slot goes to the layers with the largest remainders. BudgetError says how much memory is needed.
    """
    if capacity < (enough := least_capacity(pieces, scope)):
        raise BudgetError(
            f"the expert cache has memory for {capacity} experts, but --split needs memory for"
            f" {enough} experts: slots for top segments and for {split.secondary_slots} bottom"
            " segments; give the cache more memory"
        )
    tops, sizes = np.asarray(split.tops, np.float64), list[int]()
    memory = capacity * split.unsplit_bytes - _bytes_for_bottoms(pieces, split)
    for device, experts in enumerate(pieces.experts_per_device):
        budget = float(memory * experts // pieces.experts)
        if scope == "shared":
            sizes.append(min(int(budget // tops.max()), experts))
            continue
        on_device = pieces.home_device[: pieces.experts] == device
        counts = np.bincount(pieces.layer[: pieces.experts][on_device], minlength=tops.size)
        shares = np.ones(tops.size) if scope == "per-layer" else np.asarray(scope, np.float64)
        exact = filled(budget, shares, tops, counts * tops) / tops
        sizes += largest_remainders(exact, tops, budget, counts)
    return sizes


def exact_slots(pieces: Pieces, copies: Copies, capacity: int) -> int:
    """Count the slots left for exact experts beside their low-precision copies.

    capacity: the cache's memory, counted in exact experts

    BudgetError if the copies leave no slot.
    """
    reserved, devices = _slots_for_copies(pieces, copies), len(pieces.active_devices)
    if capacity < reserved + devices:
        raise BudgetError(
            f"the expert cache has memory for {capacity} experts, but --miss-precision needs"
            f" memory for {reserved + devices} experts, {reserved} of them for"
            f" {sum(pieces.secondary_slots)} low-precision copies; give the cache more memory"
        )
    return capacity - reserved


def proportional(capacity: int, shares: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide a number of slots into whole numbers in proportion to shares.

    Each number is from 1 to its element of `most`. The numbers add up to `capacity`, or to the sum
    of `most` if this is less. They are rounded by the largest remainders.
    """
    top = np.asarray(most, np.float64)
    exact = filled(capacity, np.asarray(shares, np.float64), np.minimum(1.0, top), top)
    return largest_remainders(exact, np.ones(top.size), capacity, top)


def largest_remainders(exact: Floats, sizes: Floats, total: float, most: NDArray[Any]) -> list[int]:
    """Round numbers of slots down; slots of the largest remainders take the memory left.

    exact: the numbers to round; sizes: the size of a slot of each; most: their upper bounds
    total: the memory that all slots may take
    """
    counts = np.floor(exact + 1e-6)
    left = total - float(counts @ sizes)
    for i in np.lexsort((np.arange(counts.size), counts - exact)).tolist():
        if counts[i] < most[i] and sizes[i] <= left:
            counts[i] += 1
            left -= sizes[i]
    return [int(n) for n in counts]


def filled(total: float, shares: Floats, least: Floats, most: Floats) -> Floats:
    """Divide a total in proportion to shares, within lower and upper bounds.

    Returns `most` if its sum is at most `total`. The result adds up to more than `total` if the sum
    of `least` does.
    """
    if most.sum() <= total:
        return most
    low, high = 0.0, float(np.max(most / shares)) + 1.0
    for _ in range(100):  # what one share is worth, to a float's precision
        worth = (low + high) / 2
        if np.clip(shares * worth, least, most).sum() > total:
            high = worth
        else:
            low = worth
    return np.clip(shares * low, least, most)
