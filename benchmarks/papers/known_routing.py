"""Share of the gap between LRU and OPT that knowledge of the next tokens' routing closes.

    python benchmarks/papers/known_routing.py --traces DIR [--tokens 0 1 2 4 8 16]

The policy knows the experts of the next --tokens tokens exactly. It evicts an expert that they do
not use, by next-use's estimates, which have learned from the same tokens; if they use all residents,
it evicts the one with the farthest use. With 0 it is next-use. The figures are bounds: what a
predictor that is never wrong would gain. Requests 1, 3, 5, ... in stored order, at most --limit
tokens of them; cells as in gap.py.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
from common import MODELS, limit, options, table

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Ids, LogicalTime, Policy, PolicySetup, compiled
from greenroom.policies import next_use, policy
from greenroom.policies.opt import next_uses
from greenroom.sim.replay import replay
from greenroom.study.gap import gap_closed, half_of
from greenroom.trace import Trace, load, stream

SHARES = (20, 40, 60)
NO_ROWS, NO_WEIGHTS = np.empty(0, np.int32), np.empty(0, np.float32)
inner_on_request, inner_on_step = next_use.on_request, next_use.on_step


class KnownState(NamedTuple):
    """State arrays of a policy that knows the next tokens' routing."""

    inner: next_use.NextUseState  # has observed the known tokens too
    layer: Ints  # [P]
    pieces: Ids  # [N] requests of the trace
    starts: Ints  # [S + 1]
    step_layer: Ids  # [S]
    step_request: Ids  # [S]
    following: Ints  # [N] index of the next request for the same expert
    due: Ints  # [P] index of the next request
    observed: Ints  # [2] steps that `inner` has observed, and the request of the last one
    step: Ints  # [1] the present step
    ahead: int  # steps that are known


def known(tokens: int) -> Policy:
    """Make the policy that knows the routing of so many next tokens."""

    def build_state(setup: PolicySetup) -> KnownState:
        trace = setup.required_trace
        return KnownState(
            inner=next_use.build_state(setup), layer=setup.layer.astype(np.int64),
            pieces=trace.pieces, starts=trace.starts, step_layer=trace.layer,
            step_request=trace.request, following=next_uses(trace.pieces, setup.pieces),
            due=np.zeros(setup.pieces, np.int64), observed=np.array([0, -1]),
            step=np.full(1, -1), ahead=tokens * setup.layers,
        )  # fmt: skip

    name = f"known-{tokens}"
    use = {"on_hit": on_use, "on_insert": on_use}
    chosen = {name: each for name, each in next_use.next_use.__dict__.items() if name == "options"}
    return Policy(name, build_state, victim, on_step=on_step, needs_trace=True, **use, **chosen)


@compiled
def on_step(cache: Any, state: KnownState, pieces: Ids, rows: Ids, weights: Floats, now: Any):
    state.step[0] += 1
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
def on_use(cache: Any, state: KnownState, piece: int, now: Any):
    state.due[piece] = state.following[now.index]


@compiled
def victim(cache: Any, state: KnownState, group: int, piece: int, now: Any) -> int:
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
        if key < lowest:
            best, lowest = other, key
    return best if best >= 0 else farthest


def row(trace: Trace, tokens: list[int]) -> list[str]:
    """The shares of the gap, one cell for each number of known tokens."""
    requests, experts = stream(trace, "natural"), int(trace.offsets[-1])

    def misses(chosen: Policy, percent: int) -> int:
        return replay(requests, trace.offsets, experts * percent // 100, chosen, pin="none").misses

    ends = {share: (misses(policy("lru"), share), misses(policy("opt"), share)) for share in SHARES}
    cells = []
    for count in tokens:
        gaps = [
            gap_closed(lru, misses(known(count), share), opt) for share, (lru, opt) in ends.items()
        ]
        cells.append(" / ".join(f"{100 * gap:.1f}" for gap in gaps))
        print(trace.tokens, count, cells[-1], flush=True)
    return cells


def main(args: argparse.Namespace) -> None:
    rows = []
    for model in args.models:
        trace = half_of(load(args.traces / f"{model}.npz"), "report").head(limit(args))
        rows.append([MODELS[model], *row(trace, args.tokens)])
    table(args, "known-routing", ["recording", *(f"{count} tokens" for count in args.tokens)], rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=10_000, models=["olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    main(parser.parse_args())
