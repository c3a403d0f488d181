"""A policy that knows the routing of the next tokens, and evicts by next-use beyond them.

It evicts an expert that the known tokens do not use, by next-use's estimates, which have learned
from the same tokens. If the known tokens use all residents, it evicts the one with the farthest
use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    CacheState,
    Ids,
    LogicalTime,
    Policy,
    PolicySetup,
    Rows,
    Weights,
    compiled,
)
from greenroom.policies.next_use import NextUseState, next_use
from greenroom.policies.opt import next_uses

inner_on_request, inner_on_step = next_use.on_request, next_use.on_step


class KnownState(NamedTuple):
    """State arrays of a policy that knows the next tokens' routing."""

    inner: NextUseState  # has observed the known tokens too
    layer: Ints  # [P]
    pieces: Ids  # [N] requests of the trace
    starts: Ints  # [S + 1]
    step_layer: Ids  # [S]
    step_request: Ids  # [S]
    following: Ints  # [N] index of the next request for the same expert
    due: Ints  # [P] index of the next request
    observed: Ints  # [2] steps that `inner` has observed, and the request of the last one
    step: Ints  # [1] the present step
    last_step: Ints  # [P] the last step that used the expert
    ahead: int  # steps that are known


def foresighted_policy(tokens: int) -> Policy:
    """Make the policy that knows the routing of so many next tokens."""

    def build_state(setup: PolicySetup) -> KnownState:
        trace = setup.required_trace
        return KnownState(
            inner=next_use.build_state(setup), layer=setup.layer.astype(np.int64),
            pieces=trace.pieces, starts=trace.starts, step_layer=trace.layer,
            step_request=trace.request, following=next_uses(trace.pieces, setup.pieces),
            due=np.zeros(setup.pieces, np.int64), observed=np.array([0, -1]),
            step=np.full(1, -1), last_step=np.full(setup.pieces, -1),
            ahead=tokens * setup.layers,
        )  # fmt: skip

    use: dict[str, Any] = {"on_hit": on_use, "on_insert": on_use}
    options = next_use.options
    return Policy(
        f"known-{tokens}",
        build_state,
        victim,
        on_step=on_step,
        needs_trace=True,
        options=options,
        **use,
    )


@compiled
def on_step(
    cache: CacheState,
    state: KnownState,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    now: LogicalTime,
) -> None:
    state.step[0] += 1
    for j in range(pieces.size):
        state.last_step[pieces[j]] = state.step[0]
    end = min(state.step[0] + state.ahead + 1, state.step_layer.size)
    for step in range(state.observed[0], end):
        request = state.step_request[step] + 0
        at = LogicalTime(now.clock, now.token, request, state.step_layer[step] + 0, 0, now.index)
        if request != state.observed[1]:
            state.observed[1] = request
            inner_on_request(cache, state.inner, at)
        chosen = state.pieces[state.starts[step] : state.starts[step + 1]]
        inner_on_step(cache, state.inner, chosen, rows, weights, at)
    state.observed[0] = max(state.observed[0], end)


@compiled
def on_use(cache: CacheState, state: KnownState, piece: int, now: LogicalTime) -> None:
    state.due[piece] = state.following[now.index]


@compiled
def victim(cache: CacheState, state: KnownState, group: int, piece: int, now: LogicalTime) -> int:
    layers = state.inner.floor.size
    horizon = state.starts[min(state.step[0] + state.ahead + 1, state.starts.size - 1)]
    best, lowest, farthest, latest = -1, np.inf, -1, -1
    for slot in range(cache.first[group], cache.first[group + 1]):
        other = cache.piece_in[slot]
        if state.due[other] < horizon:
            if state.due[other] > latest:
                farthest, latest = other, state.due[other]
            continue
        layer = state.layer[other]
        ahead = layer - now.layer if layer > now.layer else layer - now.layer + layers
        key = state.inner.value[layer, other - state.inner.begin[layer]]
        key *= state.inner.nearness[ahead]
        if state.last_step[other] == state.step[0]:
            key += 1.0  # as next-use: the present step's experts leave last
        if key < lowest or (key == lowest and other < best):
            best, lowest = other, key
    return best if best >= 0 else farthest
