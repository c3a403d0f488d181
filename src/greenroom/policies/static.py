"""Static policy: the most requested experts stay in the cache, and no miss is inserted.

This is the baseline of ProMoE, section 5.1. Requests are counted on a named part of the trace. The
pieces requested most there are resident from the start, as many as each group has slots; all others
are computed from scratch slots. Ties go to the later last request, then to the lower id. All other
policies insert every miss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Floats,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    compiled,
)
from greenroom.core.stream import Stream
from greenroom.errors import UsageError
from greenroom.policies.helpers import scan

PARTS = "all, first-half, second-half, prefill, decode or FROM-TO (prompts, counted from 0)"


class StaticState(NamedTuple):
    """State arrays of the static policy: P pieces."""

    rank: Ints  # [P] 0 is the piece that was requested most
    score: Floats  # [P] its negative


def part_of(stream: Stream, part: str) -> NDArray[np.bool_]:
    """Flag the steps [S] in a named part of a trace. UsageError for an unknown or empty part."""
    prompts = int(stream.request[-1]) + 1 if stream.request.size else 0
    begin, dash, end = part.partition("-")
    if part == "all":
        steps = np.ones(stream.layer.size, np.bool_)
    elif part == "first-half":
        steps = stream.request < (prompts + 1) // 2
    elif part == "second-half":
        steps = stream.request >= (prompts + 1) // 2
    elif part in ("prefill", "decode"):
        steps = stream.prefill if part == "prefill" else ~stream.prefill
    elif dash and begin.isdigit() and end.isdigit():
        steps = (stream.request >= int(begin)) & (stream.request <= int(end))
    else:
        raise UsageError(f"part of static must be {PARTS}: {part!r}")
    if stream.layer.size and not steps.any():
        raise UsageError(f"part of static is empty: {part!r} of {prompts} prompts")
    return steps


def build_state(setup: PolicySetup) -> StaticState:
    stream = setup.required_trace
    steps = part_of(stream, setup.options["part"])
    chosen = np.flatnonzero(np.repeat(steps, np.diff(stream.starts)))
    pieces = stream.pieces[chosen]
    last = np.full(setup.pieces, -1, np.int64)
    last[pieces] = chosen  # NumPy stores the last of equal indices
    count = np.bincount(pieces, minlength=setup.pieces)
    order = np.lexsort((np.arange(setup.pieces), -last, -count))
    rank = np.empty(setup.pieces, np.int64)
    rank[order] = np.arange(setup.pieces)
    return StaticState(rank, -rank.astype(np.float64))


def residents(setup: PolicySetup) -> Ints:
    """List the most requested pieces of each cache group, which the static policy pins."""
    rank = build_state(setup).rank
    chosen = []
    for group, size in enumerate(setup.sizes):
        members = np.flatnonzero(setup.group_of == group)
        chosen.append(members[np.argsort(rank[members])][:size])
    return np.concatenate(chosen)


@compiled
def victim(cache: CacheState, state: StaticState, group: int, piece: int, now: LogicalTime) -> int:
    """Choose the least requested piece as the static policy's victim when the cache shrinks."""
    return int(scan.lowest_unpinned(cache, group, state.score, state.rank))


static = Policy(
    "static",
    build_state,
    victim,
    options=(PolicyOption("part", "all", f"where requests are counted: {PARTS}"),),
    needs_trace=True,
    preload=residents,
)
