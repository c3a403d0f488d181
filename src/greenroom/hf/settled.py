"""What a run takes that is told nothing but a size: what was measured for this model and machine,
or chosen for sure by a plan; else the defaults, which a plan assumes too."""

from __future__ import annotations

from dataclasses import replace

from greenroom.config import LoadConfig, scope_of, split_of
from greenroom.core.machine import name_of
from greenroom.core.scope import least_capacity
from greenroom.hf.parts import Parts
from greenroom.hf.slots import pieces_of
from greenroom.hf.split import split_experts
from greenroom.plan import kept
from greenroom.runtime.measure import host

TOLD = ("policy", "scope", "split", "pin", "prefetch", "predictor", "no_guard")  # the user did


def settled(parts: Parts, config: LoadConfig, room: int, top_k: int) -> Parts:
    """The parts with the settings that are kept for about `room` slots, if the user gave none.

    Reads one small file; nothing is simulated here, so that it costs a start nothing.
    """
    fields = LoadConfig.__dataclass_fields__
    told = any(getattr(config, name) != fields[name].default for name in TOLD)
    if told or not parts.remember or not parts.fingerprint or parts.cuda:
        return parts
    if room >= parts.catalog.experts:  # nothing to choose
        return parts
    found = kept.load(parts.fingerprint, name_of(host())).near(room)
    if found is None:
        return parts
    scope = scope_of(found.options.get("scope", config.scope))
    shares, cut = split_of(found.options.get("split", config.split)), parts
    if shares is not None:
        if parts.thresholds is not None:  # experts that are split have no copies
            return parts
        assert not isinstance(shares, str)  # tune and plan have shares to split at
        catalog, split = split_experts(parts.catalog, shares, top_k)
        cut = replace(parts, catalog=catalog, split=split)
    least = least_capacity(pieces_of(cut), scope)
    if room < least:
        return parts
    how = "measured by tune" if found.by == "tune" else "chosen by plan"
    less = 1 - found.tpot / found.plain
    said = f"{how} on {found.when}" + (
        f", {less:.0%} less time a token than LRU" if less > 0.005 else ""
    )
    return replace(
        cut,
        capacity=max(parts.capacity, least),
        policy=found.options.get("policy", parts.policy),
        scope=scope,
        prefetch=found.options.get("prefetch", parts.prefetch),
        chosen=said,
    )
