"""The choice of a placement of experts on several devices: by the time of a token's experts.

experts: The experts of each layer are spread. Their weights are read by the memories of all
         devices, and missing ones come over all links. Each device that has experts of a token gets
         the layer's inputs, and its outputs return.
layers:  Each layer has one device, whose memory and link serve all of its experts. Inputs and
         outputs move only if this is not the first device, which has the dense parts.

Both are estimated on the same routing, whose last part is replayed through caches of LRU. Reads
from the disk, which devices share, take equally long with both and do not count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greenroom.core.config.base import AUTO, PLACEMENTS
from greenroom.core.cost import Costs
from greenroom.core.home_devices import SPREAD, DevicePlacement
from greenroom.core.pieces import Pieces
from greenroom.policies import policy
from greenroom.sim.timed import replay_steps
from greenroom.trace import Trace, stream

STEPS = 12_000  # of a replay, at tens of microseconds each


def place_experts(
    named: str,
    trace: Trace,
    slots: Callable[[Pieces], int],
    costs: Costs,
    nbytes: int,
    devices: int,
) -> DevicePlacement:
    """Return the placement that is named, or with `auto` the faster one.

    named:  value of `--device-placement`
    slots:  returns the slots of all devices together, for the experts on devices
    nbytes: bytes of an expert

    More devices than layers get experts of each layer.
    """
    if named != AUTO:
        return DevicePlacement(named)
    if not 1 < devices <= trace.layers:
        return SPREAD
    seconds = {}
    for name in PLACEMENTS:
        sizes = [nbytes] * trace.layers
        pieces = Pieces.unsplit(trace.offsets.tolist(), sizes, devices=devices, placement=name)
        seconds[name] = trace.layers * step_seconds(pieces, trace, slots(pieces), costs)
    best, other = sorted(PLACEMENTS, key=lambda name: seconds[name])
    return DevicePlacement(best, (seconds[best], seconds[other]))


def slots_of(each: int, pieces: Pieces) -> int:
    """Return how many slots devices have together, with `each` on each: at most one an expert."""
    return min(int(each * pieces.equal_devices), pieces.experts)


def step_seconds(pieces: Pieces, trace: Trace, capacity: int, costs: Costs) -> float:
    """Estimate the seconds that a decoded token's experts take in a layer, on average.

    A device computes its experts while it loads missing ones, of which it computes the last at the
    end; the slowest device counts. Inputs reach the other devices in turn. Caches are full: the
    first half of the trace does not count.
    """
    passes = min(trace.passes, max(2, STEPS // trace.layers))
    part = trace.head(int(trace.pass_starts[passes]))
    steps, devices = stream(part, "runtime"), pieces.devices
    missed = np.zeros(steps.pieces.size, np.bool_)
    if capacity < pieces.experts:
        missed, _ = replay_steps(steps, part.offsets, capacity, policy("lru"), pieces=pieces)
    step = np.repeat(np.arange(steps.layer.size), np.diff(steps.starts))
    at = step * devices + pieces.home_device[steps.pieces]
    shape = steps.layer.size, devices
    computed, loaded = (
        np.bincount(at, each, steps.layer.size * devices).reshape(shape) for each in (None, missed)
    )
    load = float(pieces.nbytes[0]) / costs.links[-1].bandwidth + costs.handling
    expert, hits = costs.expert.seconds(1), computed - loaded
    begin = np.where(hits > 0, 0.0, load)  # of a device's first group
    begin[:, 1:] += np.cumsum(computed[:, 1:] > 0, axis=1) * costs.hop
    busy = np.maximum(begin + hits * expert, loaded * load) + (loaded > 0) * expert
    seconds = np.where(computed > 0, busy, 0.0).max(axis=1) + loaded.any(axis=1) * costs.miss
    later = (steps.token >= passes // 2) & ~steps.prefill.astype(np.bool_)
    return float(seconds[later].mean()) if later.any() else 0.0
