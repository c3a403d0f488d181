"""Export and restore what a cache's eviction policy has learned, for later runs.

Each device of a cache has an instance of the policy. The arrays of instance d are named `d/NAME`.
"""

from __future__ import annotations

import re

from greenroom.core.cache.cache import Cache
from greenroom.core.policy import Arrays


def export_learned(cache: Cache) -> Arrays:
    """Export what the policies of a cache's devices have learned; empty if they learn nothing."""
    return {
        f"{device}/{name}": array
        for device, state in enumerate(cache.policy_states)
        for name, array in cache.policy.export_learned(state).items()
    }


def restore_learned(cache: Cache, arrays: Arrays) -> None:
    """Restore what the policies of a cache's devices have learned in an earlier run.

    ValueError if the arrays are of another number of devices, of another version or of another
    model.
    """
    devices = {re.match(r"(\d*)/?", name)[1] for name in arrays}  # type: ignore[index]
    if devices != {str(device) for device in range(cache.pieces.devices)}:
        raise ValueError(
            f"the stored arrays are of {len(devices)} devices, but the cache has"
            f" {cache.pieces.devices}"
        )
    for device, state in enumerate(cache.policy_states):
        start = f"{device}/"
        part = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
        cache.policy.restore_learned(state, part)
