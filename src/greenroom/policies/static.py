"""Static policy: the most requested experts stay in the cache, and no miss is inserted.

This is the baseline of ProMoE, section 7.1. Requests are counted in a named part of a trace. The
experts requested most in that part are in the cache from the start, as many as each slot group has
slots. All other experts pass through temporary slots; the paper has two, here a step has as many
as it needs. Of equal experts, the one requested last is cached first, then the one with the lower
id. All other policies insert every miss.
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
    """State arrays of the static cache policy, for P experts."""

    rank: Ints  # [P] 0 is the piece that was requested most
    score: Floats  # [P] its negative


def part_of(stream: Stream, part: str) -> NDArray[np.bool_]:
    """Return a flag for each step of a trace, set in the named part.

    The parts are all, first-half and second-half (of the prompts), prefill, decode, and FROM-TO
    (prompt numbers). Raises UsageError for another name, and for a part without steps.
    """
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
        raise UsageError(f"option part of policy static must be {PARTS}; got {part!r}")
    if stream.layer.size and not steps.any():
        raise UsageError(
            f"option part of policy static is {part!r}, which has no step of this trace of"
            f" {prompts} prompts"
        )
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
    """Return the most requested experts of each slot group, one for each slot."""
    rank = build_state(setup).rank
    chosen = []
    for group, size in enumerate(setup.sizes):
        members = np.flatnonzero(setup.group_of == group)
        chosen.append(members[np.argsort(rank[members])][:size])
    return np.concatenate(chosen)


@compiled
def victim(cache: CacheState, state: StaticState, group: int, piece: int, now: LogicalTime) -> int:
    """Choose the least requested expert as the victim; called only when the cache shrinks."""
    return int(scan.lowest_unpinned(cache, group, state.score, state.rank))


static = Policy(
    "static",
    build_state,
    victim,
    options=(PolicyOption("part", "all", f"where requests are counted: {PARTS}"),),
    needs_trace=True,
    preload=residents,
)
