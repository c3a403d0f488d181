"""Replay of a trace's expert requests against an eviction policy, to count cache misses.

One compiled call serves all expert requests, by the same functions as in a run of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.bound import bind
from greenroom.core.cache.cache import check_pin
from greenroom.core.cache.scope import Scope, split_capacity
from greenroom.core.cache.state import empty_state, preload
from greenroom.core.compiling.compile_cache import jit, with_parts
from greenroom.core.pieces import Ints
from greenroom.core.policy import Arrays, CacheState, LogicalTime, Policy
from greenroom.core.stream import Stream
from greenroom.errors import BudgetError, UsageError


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay: numbers of expert requests and of cache misses.

    An expert request is for one expert in one step. `missed` says for each of them whether it was a
    miss; it is None unless the replay was called with `detail`. `learned` is what the policy has
    learned; it is None unless the replay was called with `learned`. `residents` says which experts
    were in the cache after each step of `watch`, each [experts].
    """

    requests: int
    misses: int
    missed: NDArray[np.bool_] | None = None
    learned: Arrays | None = None
    residents: Sequence[NDArray[np.bool_]] = ()

    @property
    def miss_ratio(self) -> float:
        return self.misses / self.requests if self.requests else 0.0


def replay(
    stream: Stream,
    offsets: Ints,
    capacity: int,
    policy: Policy,
    *,
    scope: Scope = "shared",
    pin: str = "step",
    seed: int = 0,
    reset: bool = False,
    detail: bool = False,
    pinned: Sequence[tuple[int, Ints]] = (),
    learned: Arrays | None = None,
    resizes: Sequence[tuple[int, int]] = (),
    watch: Sequence[int] = (),
) -> ReplayResult:
    """Replay expert requests through an initially empty cache, and count misses.

    stream:   expert requests in order, as `greenroom.trace.stream` makes them
    offsets:  first expert id of each layer, and the number of all experts, [layers + 1]
    capacity: number of experts that the cache can hold
    scope:    one cache for all layers ("shared"), or a share of the capacity for each layer
    pin:      "step" protects the experts of the current step from eviction; "none" does not
    seed:     seed of policies that draw random numbers
    reset:    start every prompt with an empty cache and a policy that has learned nothing
    detail:   return `missed` too
    pinned:   (step, experts) in ascending order: from that step on, these experts are never evicted
              once they are in the cache, and those of the entry before may be; not with `reset`
    learned:  what the policy has learned in an earlier replay (empty: nothing), so that the result
              has what it has learned at the end; not with `reset`
    resizes:  (step, capacity) in ascending order: the capacity from that step on; not with `reset`
    watch:    numbers of served steps, ascending and from 1 on, after which `residents` is read

    Releases the GIL. Raises UsageError for an impossible capacity, scope or pin, BudgetError if
    pinned experts leave no slot for others, and ValueError if `learned` does not fit.
    """
    check_pin(pin)
    layer = layer_of_ids(offsets)
    check_capacity(capacity, layer.size)
    sizes_at = _sizes_at(((0, capacity), *resizes), scope, offsets)
    _check_reset(reset, pinned, learned, resizes)
    loop, misses, exported = _bound_loop(policy), 0, None
    missed = np.zeros(stream.pieces.size if detail else 0, np.bool_)
    residents, watched, cuts = [], {*watch}, sorted({*sizes_at, *watch})
    for begin, end in step_ranges(stream, reset):
        sizes = sizes_at[0]
        state, memory = _empty_cache(policy, offsets, sizes, seed, stream, learned)
        for first, last, stay in cut_ranges(_pinned_ranges(pinned, begin, end), cuts):
            if sizes_at.get(first, sizes) != sizes:
                sizes = sizes_at[first]
                state = resize(state, memory, policy, layer, sizes, stream, first)
            state.pinned[:], state.pinned[stay] = 0, 1
            open_to = _open_to_others(state, sizes, stay)
            misses += loop(
                state, memory, stream, first, last, pin == "step", missed, open_to, first == begin
            )
            if last in watched:
                residents.append(state.slot_of >= 0)
        exported = None if learned is None else policy.export_learned(memory)
    return ReplayResult(stream.pieces.size, misses, missed if detail else None, exported, residents)


def _empty_cache(
    policy: Policy, offsets: Ints, sizes: list[int], seed: int, stream: Stream,
    learned: Arrays | None,
) -> tuple[CacheState, Any]:  # fmt: skip
    """Return the states of an empty cache, and of its policy with what it has learned."""
    layer = layer_of_ids(offsets)
    state = empty_state(layer, sizes)
    setup = policy.setup(layer, state.group_of, tuple(sizes), len(offsets) - 1, seed, stream)
    memory = policy.build_state(setup)
    if policy.preload is not None:
        preload(state, policy.preload(setup))
    if learned:
        policy.restore_learned(memory, learned)
    return state, memory


def _sizes_at(
    capacities: Sequence[tuple[int, int]], scope: Scope, offsets: Ints
) -> dict[int, list[int]]:
    """Return the sizes of the cache's slot groups, by the step from which they hold."""
    experts = np.diff(offsets).tolist()
    return {step: split_capacity(n, len(experts), scope, experts) for step, n in capacities}


def check_capacity(capacity: int, experts: int) -> None:
    """Raise UsageError unless the capacity is from one slot to the number of experts."""
    if not 1 <= capacity <= experts:
        raise UsageError(
            f"the capacity is {capacity}: it must be from 1 to {experts}, the number of all experts"
        )


def layer_of_ids(offsets: Ints) -> Ints:
    """Return the layer of each expert, by expert id.

    `offsets` has the first expert id of each layer, and the number of all experts, [layers + 1].
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def step_ranges(stream: Stream, reset: bool) -> list[tuple[int, int]]:
    """Split a replay's steps into ranges (begin, end) that start with an empty cache.

    With `reset` there is one range for each prompt and its answer, else one for all steps.
    """
    steps = stream.layer.size
    if not reset or steps == 0:
        return [(0, steps)]
    cuts = np.flatnonzero(np.diff(stream.request)) + 1
    ends = [*cuts.tolist(), steps]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _pinned_ranges(
    pinned: Sequence[tuple[int, Ints]], begin: int, end: int
) -> list[tuple[int, int, Ints]]:
    """Split a range of steps into ranges (first, end, experts) with constant pinned experts."""
    none = np.empty(0, np.int64)
    changes = [(begin, none), *((max(begin, s), pieces) for s, pieces in pinned if s < end)]
    ends = [*(s for s, _ in changes[1:]), end]
    return [(s, e, pieces) for (s, pieces), e in zip(changes, ends, strict=True) if s < e]


def cut_ranges(
    ranges: Sequence[tuple[int, int, Ints]], steps: Sequence[int]
) -> list[tuple[int, int, Ints]]:
    """Cut ranges of steps (first, end, pinned experts) before each of some steps, ascending."""
    cut = []
    for first, end, pinned in ranges:
        inside = [step for step in steps if first < step < end]
        starts = [first, *inside]
        cut += [(a, b, pinned) for a, b in zip(starts, [*inside, end], strict=True)]
    return cut


def resize(
    state: CacheState, memory: object, policy: Policy, layer: Ints, sizes: list[int],
    stream: Stream, step: int,
) -> CacheState:  # fmt: skip
    """Return a cache's state with other sizes of its slot groups, before a step.

    The policy chooses the victims, as in a run: at the time of the step before.
    """
    last = step - 1
    at = LogicalTime(
        stream.now[last], stream.token[last], stream.request[last] + 0, stream.layer[last] + 0,
        int(stream.prefill[last]), stream.starts[step],
    )  # fmt: skip
    state.pinned[:] = 0
    evict_victim = bind(policy).evict_victim
    residents = np.flatnonzero(state.slot_of >= 0)
    groups = np.bincount(state.group_of[residents], minlength=len(sizes))
    for group, size in enumerate(sizes):
        for _ in range(int(groups[group]) - size):
            evict_victim(state, memory, group, at)
    resized = empty_state(layer, sizes)
    preload(resized, np.flatnonzero(state.slot_of >= 0))
    return resized


def _check_reset(
    reset: bool,
    pinned: Sequence[tuple[int, Ints]],
    learned: Arrays | None,
    resizes: Sequence[tuple[int, int]],
) -> None:
    """Check that nothing but `reset` decides what is in the cache when a request begins."""
    if not reset:
        return
    if resizes:
        raise UsageError("--resize and --reset exclude each other: leave one out")
    if learned is not None:
        raise ValueError("`reset` and `learned` exclude each other: leave one out")
    if pinned:
        raise UsageError(
            "--pin FILE and --reset exclude each other, since --reset empties the cache before each"
            " prompt: leave one out"
        )


def _open_to_others(state: CacheState, sizes: Sequence[int], pinned: Ints) -> Ints:
    """Count the slots of each group that pinned experts leave; BudgetError if one has none."""
    open_to = np.array(sizes) - np.bincount(state.group_of[pinned], minlength=len(sizes))
    if open_to.min() < 1:
        raise BudgetError(
            f"the {pinned.size} experts of --pin leave no slot for other experts: give a larger"
            " --capacity, or pin fewer experts"
        )
    return open_to


def _bound_loop(policy: Policy) -> Any:
    return _loop(bind(policy).miss, policy.on_hit, policy.on_step, policy.on_request)


# Parts of the loop, which `with_parts` replaces by compiled functions.
miss: Any = None
on_hit: Any = None
on_step: Any = None
on_request: Any = None


@cache
def _loop(miss: Any, on_hit: Any, on_step: Any, on_request: Any) -> Any:
    parts = {"miss": miss, "on_hit": on_hit, "on_step": on_step, "on_request": on_request}
    return jit(with_parts(loop, parts), _nrt=False)


def loop(
    state: CacheState,
    memory: Any,
    stream: Stream,
    begin: int,
    end: int,
    pin: bool,
    missed: NDArray[np.bool_],
    open_to: Ints,
    anew: bool,
) -> int:
    """Serve the expert requests of steps `begin` to `end - 1`; return the number of misses.

    pin:     whether the experts of the current step are protected from eviction
    missed:  receives for each expert request whether it was a miss; may be empty
    open_to: slots of each cache group that are not taken by permanently pinned experts
    anew:    whether the first step begins a prompt, even if the step before is of the same one
    """
    # + 0 makes 32 bits the 64 that numbers have in a run: a policy is compiled once for both.
    misses, request = 0, -1 if begin == 0 else stream.request[begin - 1] + 0
    for s in range(begin, end):
        a, b = stream.starts[s], stream.starts[s + 1]
        clock, token, layer = stream.now[s], stream.token[s], stream.layer[s] + 0
        prefill = int(stream.prefill[s])
        now = LogicalTime(clock, token, stream.request[s] + 0, layer, prefill, a)
        if stream.request[s] != request or (anew and s == begin):
            request = stream.request[s] + 0
            on_request(state, memory, now)
        on_step(state, memory, stream.pieces[a:b], stream.rows[a:b], stream.weights[a:b], now)
        pinned = False
        for i in range(a, b):
            piece = stream.pieces[i] + 0
            at = LogicalTime(clock, token, request, layer, prefill, i)
            if state.slot_of[piece] >= 0:
                on_hit(state, memory, piece, at)
                continue
            misses += 1
            if missed.size:
                missed[i] = True
            group = state.group_of[piece]
            if pin and not pinned and state.free_count[group] == 0:
                # The step is pinned lazily: pins matter only once a victim is needed.
                others = 0
                for j in range(a, b):
                    others += state.pinned[stream.pieces[j]] == 0
                pinned = others <= open_to[group]
                if pinned:
                    for j in range(a, b):
                        state.pinned[stream.pieces[j]] += 1
            miss(state, memory, piece, at)
        if pinned:
            for j in range(a, b):
                state.pinned[stream.pieces[j]] -= 1
    return misses
