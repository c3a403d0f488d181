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
    named: str, trace: Trace, capacity: int, costs: Costs, nbytes: int, devices: int
) -> DevicePlacement:
    """Return the placement that is named, or with `auto` the faster one.

    named:    value of `--device-placement`
    capacity: slots of all devices together
    nbytes:   bytes of an expert

    More devices than layers get experts of each layer.
    """
    if named != AUTO:
        return DevicePlacement(named)
    if not 1 < devices <= trace.layers:
        return SPREAD
    seconds = {
        name: trace.layers * step_seconds(name, trace, capacity, costs, nbytes, devices)
        for name in PLACEMENTS
    }
    best, other = sorted(PLACEMENTS, key=lambda name: seconds[name])
    return DevicePlacement(best, (seconds[best], seconds[other]))


def step_seconds(
    placement: str, trace: Trace, capacity: int, costs: Costs, nbytes: int, devices: int
) -> float:
    """Estimate the seconds that a decoded token's experts take in a layer, on average.

    A device computes its experts and loads missing ones; the slowest device counts. The host serves
    the others one after another. The arguments are those of `place_experts`. Caches are full: the
    first half of the trace does not count.
    """
    passes = min(trace.passes, max(2, STEPS // trace.layers))
    part = trace.head(int(trace.pass_starts[passes]))
    steps, offsets = stream(part, "runtime"), part.offsets.tolist()
    pieces = Pieces.unsplit(offsets, [nbytes] * part.layers, devices=devices, placement=placement)
    missed = np.zeros(steps.pieces.size, np.bool_)
    if capacity < offsets[-1]:
        missed, _ = replay_steps(steps, part.offsets, capacity, policy("lru"), pieces=pieces)
    step = np.repeat(np.arange(steps.layer.size), np.diff(steps.starts))
    at = step * devices + pieces.home_device[steps.pieces]
    shape = steps.layer.size, devices
    computed, loaded = (
        np.bincount(at, each, steps.layer.size * devices).reshape(shape) for each in (None, missed)
    )
    load = nbytes / costs.links[-1].bandwidth + costs.handling
    busy = computed * costs.expert.seconds(1) + loaded * load
    seconds = busy.max(axis=1) + (computed[:, 1:] > 0).sum(axis=1) * costs.hop
    later = (steps.token >= passes // 2) & ~steps.prefill.astype(np.bool_)
    return float(seconds[later].mean()) if later.any() else 0.0
