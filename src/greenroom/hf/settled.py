"""What a run takes that is told nothing but a size: what was measured for this model and machine,
or chosen for sure by a plan; else what a quick plan says, which is the default or LRU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise

from greenroom.config import LoadConfig, scope_of, split_of
from greenroom.core.machine import name_of
from greenroom.core.scope import least_capacity
from greenroom.errors import OutputError
from greenroom.hf import learned
from greenroom.hf.parts import Parts
from greenroom.hf.recent import trace_of
from greenroom.hf.slots import pieces_of
from greenroom.hf.split import split_experts
from greenroom.plan import kept
from greenroom.plan.evidence import decoded, enough, stand_in
from greenroom.plan.kept import Kept
from greenroom.plan.quick import quick
from greenroom.plan.settings import PLAIN
from greenroom.runtime.measure import host

log = logging.getLogger(__name__)

TOLD = ("policy", "scope", "split", "pin", "prefetch", "predictor", "no_guard")  # the user did


def settled(parts: Parts, config: LoadConfig, room: int, top_k: int) -> Parts:
    """The parts with the settings that are kept for about `room` slots, if the user gave none;
    where none are kept, with those of a quick plan, which are kept then."""
    fields = LoadConfig.__dataclass_fields__
    told = any(getattr(config, name) != fields[name].default for name in TOLD)
    if told or not parts.remember or not parts.fingerprint:
        return parts
    if room >= parts.catalog.experts:  # nothing to choose
        return parts
    sizes = tuple(b - a for a, b in pairwise(parts.catalog.offsets))
    found = taken(parts.fingerprint, name_of(host()), sizes, top_k, room, device_of(parts))
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
    return replace(
        cut,
        capacity=max(parts.capacity, least),
        policy=found.options.get("policy", parts.policy),
        scope=scope,
        prefetch=found.options.get("prefetch", parts.prefetch),
        chosen=_said(found),
    )


def _said(found: Kept) -> str:
    """For the line with which a run begins; nothing of a quick plan that keeps to the default."""
    less = 1 - found.tpot / found.plain
    if found.by == "quick":
        plain = found.options.get("policy") == PLAIN.policy
        return "LRU, which misses no more experts in a quick plan" if plain else ""
    how = "measured by tune" if found.by == "tune" else "chosen by plan"
    return f"{how} on {found.when}" + (
        f", {less:.0%} less time a token than LRU" if less > 0.005 else ""
    )


def taken(
    fingerprint: str, machine: str, sizes: Sequence[int], top_k: int, room: int, device: str
) -> Kept | None:
    """What is kept of a model whose layers have so many experts for about `room` slots, or a quick
    plan finds now. None where nothing is to be kept (GREENROOM_LEARNED=off), or not even a token's
    experts of a layer have room: then runs take the default."""
    known = kept.load(fingerprint, machine)
    found = known.near(room, device)
    if (found is not None and found.by != "quick") or not kept.switched_on():
        return found
    own = trace_of(learned.load(fingerprint), sizes)
    tokens = decoded(own) if own is not None and enough(own) else 0
    if found is not None and (not tokens or tokens < 2 * found.tokens):  # that has half of it seen
        return found
    trace = own if own is not None and tokens else stand_in(sizes, top_k)
    if room < max(top_k, trace.top_k):
        return None
    made = quick(trace, room)
    entry = Kept(
        room, made.setting.options(), "quick", made.misses, max(made.plain, 1e-9),
        date.today().isoformat(), device, tokens,
    )  # fmt: skip
    try:
        kept.save(fingerprint, machine, known.with_setting(entry))
    except OutputError as error:
        log.warning("what a quick plan found is not kept: %s", error)
    return entry


def device_of(parts: Parts) -> str:
    """What settings are kept by."""
    return "cuda" if parts.cuda else "cpu"
