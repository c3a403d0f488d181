"""A referee of eviction policies: it watches their victims, and counts misses by itself.

The policy decides in Greenroom's own replay. The referee repeats the replay with a cache of its
own, in which only the victims are the policy's, so that nothing that a policy does to the arrays
of the simulated cache changes the number of misses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.pieces import Ints
from greenroom.core.policy import Policy, compiled
from greenroom.core.stream import Stream
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

NONE, UNKNOWN, NOT_RESIDENT, PINNED, ALTERED = 1, 2, 3, 4, 5
FAULTS = {
    NONE: "exceeds the capacity: it chooses no victim although the cache is full",
    UNKNOWN: "chooses a victim that is not an expert",
    NOT_RESIDENT: "exceeds the capacity: its victim is not in the cache",
    PINNED: "evicts a pinned expert, which the present step needs",
    ALTERED: "changes the arrays of the cache: its misses are not those that its victims make",
}
PARTS = ("victim", "on_hit", "on_insert", "on_evict", "on_step", "on_request")
CUTS = 48  # places in a trace from which on the routing is changed


class RuleError(Exception):
    """A policy breaks a rule of the benchmark; the message names the rule."""


class AuditState(NamedTuple):
    """State arrays of an audited policy, for N requests."""

    inner: Any  # the policy's own state
    victims: NDArray[np.int32]  # [N] the victim of each request, or -1


@dataclass(frozen=True)
class Verdict:
    """What the referee has counted: misses, and the victim of each request (-1: none)."""

    misses: int
    victims: NDArray[np.int32]


def audited(policy: Policy, victims: NDArray[np.int32]) -> Policy:
    """Wrap a policy so that its victims are stored, and unusable ones are replaced.

    An index that is no resident expert would damage the replay's memory: the referee sees it, and
    the replay gets another victim.
    """
    parts = {part: getattr(policy, part) for part in PARTS}
    return replace(
        policy,
        build_state=lambda setup: AuditState(policy.build_state(setup), victims),
        **_wrapped(*parts.values()),
    )


@cache
def _wrapped(
    choose: Any, hit: Any, insert: Any, evict: Any, step: Any, request: Any
) -> dict[str, Any]:
    """Return compiled functions that call a policy's with its own state, by their names."""

    @compiled
    def victim(cache, state, group, piece, now):
        chosen = choose(cache, state.inner, group, piece, now)
        state.victims[now.index] = chosen
        if 0 <= chosen < cache.slot_of.size and cache.slot_of[chosen] >= 0:
            return chosen
        return cache.piece_in[cache.first[group]]

    @compiled
    def on_hit(cache, state, piece, now):
        hit(cache, state.inner, piece, now)

    @compiled
    def on_insert(cache, state, piece, now):
        insert(cache, state.inner, piece, now)

    @compiled
    def on_evict(cache, state, piece, now):
        evict(cache, state.inner, piece, now)

    @compiled
    def on_step(cache, state, pieces, rows, weights, now):
        step(cache, state.inner, pieces, rows, weights, now)

    @compiled
    def on_request(cache, state, now):
        request(cache, state.inner, now)

    return dict(zip(PARTS, (victim, on_hit, on_insert, on_evict, on_step, on_request), strict=True))


@jit
def _recount(
    pieces: Ints, starts: Ints, experts: int, capacity: int, pin: bool, victims: Ints
) -> tuple[int, int, int]:
    """Count misses with the given victims; return (misses, fault or 0, request of the fault)."""
    resident, needed = np.zeros(experts, np.bool_), np.zeros(experts, np.bool_)
    free, misses = capacity, 0
    for s in range(starts.size - 1):
        begin, end = starts[s], starts[s + 1]
        protected = pin and end - begin <= capacity
        for i in range(begin, end):
            needed[pieces[i]] = True
        for i in range(begin, end):
            if resident[pieces[i]]:
                continue
            misses += 1
            if free > 0:
                free -= 1
            else:
                victim = victims[i]
                if victim == -1:
                    return misses, NONE, i
                if victim < 0 or victim >= experts:
                    return misses, UNKNOWN, i
                if not resident[victim]:
                    return misses, NOT_RESIDENT, i
                if protected and needed[victim]:
                    return misses, PINNED, i
                resident[victim] = False
            resident[pieces[i]] = True
        for i in range(begin, end):
            needed[pieces[i]] = False
    return misses, 0, 0


def judge(
    policy: Policy, requests: Stream, offsets: Ints, capacity: int, pin: str, seed: int = 0
) -> Verdict:
    """Replay requests with a policy, and recount its misses; RuleError if a rule is broken."""
    victims = np.full(requests.pieces.size, -1, np.int32)
    try:
        played = replay(requests, offsets, capacity, audited(policy, victims), pin=pin, seed=seed)
    except NumbaError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RuleError(f"does not compile: {' '.join(lines)[:300]}") from error
    misses, fault, at = _recount(
        requests.pieces, requests.starts, int(offsets[-1]), capacity, pin == "step", victims
    )
    if not fault and misses != played.misses:
        fault, at = ALTERED, requests.pieces.size - 1
    if fault:
        raise RuleError(f"{FAULTS[fault]} (request {at} of {requests.pieces.size:,}, pin {pin})")
    return Verdict(misses, victims)


def check_rules(policy: Policy, trace: Trace, seed: int) -> None:
    """Check a policy's rules on a trace; RuleError names the rule that is broken.

    It must choose the same victims a second time, and the same ones up to a step from which on the
    routing is another, for many such steps.
    """
    if policy.needs_trace:
        raise RuleError("looks into the future: it says so itself (needs_trace)")
    if policy.preload is not None:
        raise RuleError("does not insert every miss: it has a fixed set of experts (preload)")
    requests, experts = stream(trace, "natural"), int(trace.offsets[-1])
    steps = np.linspace(trace.layers, trace.tokens * trace.layers - 1, CUTS).astype(int)
    others = [stream(_with_other_end(trace, step), "natural") for step in steps]
    for percent in (20, 60):
        for pin in ("none", "step"):
            settings = trace.offsets, experts * percent // 100, pin, seed
            victims = judge(policy, requests, *settings).victims
            if not np.array_equal(victims, judge(policy, requests, *settings).victims):
                raise RuleError("is not deterministic: a second replay has other victims")
            for step, other in zip(steps, others, strict=True):
                begin = int(requests.starts[step])
                changed = judge(policy, other, *settings).victims[:begin] != victims[:begin]
                if changed.any():
                    raise RuleError(
                        f"looks into the future: its victim at request {int(changed.argmax())}"
                        f" depends on routing from request {begin} on (pin {pin})"
                    )


def _with_other_end(trace: Trace, step: int) -> Trace:
    """Copy a trace with other experts from a step on: each layer's ids, moved by one."""
    moved = trace.experts.reshape(-1, trace.top_k).copy()
    most = np.tile(trace.experts_per_layer, trace.tokens)[step:, None]
    moved[step:] = (moved[step:].astype(np.int64) + 1) % most
    return replace(trace, experts=moved.reshape(trace.experts.shape))
