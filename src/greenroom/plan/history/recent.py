"""Routing of the latest tokens of a model's runs, stored in the model's routing history.

Plans without a recording use it as their workload, as do the defaults of a run (plan/workload.py).
Only passes of single sequences are recorded, since a pass of several sequences mixes their tokens.
Only the ids of experts are stored: no text, no token, no weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from greenroom.core.predictor import Ids
from greenroom.errors import TraceError
from greenroom.plan.history.routing import Arrays, RoutingHistory
from greenroom.trace import Trace
from greenroom.trace.trace import starts_of

NAME = "recent"  # name of the state
TOKENS = 4096  # the latest ones are stored


class RoutedPass(NamedTuple):
    """The routing of one forward pass of one sequence.

    experts: ids of the chosen experts within their layer, [tokens, layers, top_k]
    request: number of the request to which the pass belongs
    prompt:  whether the pass computed a prompt, and not a generated token
    """

    experts: np.ndarray
    request: int
    prompt: bool


class RecentRouting:
    """Observer of a model's forward passes that records the routing of the latest 4,096 tokens."""

    def __init__(self, offsets: Sequence[int], history: RoutingHistory | None) -> None:
        """Begin with the routing that earlier runs stored in `history`, if any.

        `offsets` [layers + 1] are the ids, counted over all layers, at which layers begin.
        """
        self._sizes = [b - a for a, b in pairwise(offsets)]
        self._passes: deque[RoutedPass] = deque()
        self._tokens, self._earlier = 0, 0
        self._now: tuple[int, bool] | None = None  # request and kind of the current pass
        self._rows: dict[int, Ids] = {}
        if (trace := recent_trace(history, self._sizes)) is not None:
            parts = np.split(trace.experts, trace.pass_starts[1:-1])
            for each in zip(
                parts, trace.pass_requests.tolist(), trace.pass_prefill.tolist(), strict=True
            ):
                self._record(RoutedPass(*each))
            self._earlier = trace.requests

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """End the last observed forward pass, and begin the next one.

        A pass of several `sequences` is not recorded. `prompt` says whether it computes a prompt.
        """
        self._end()
        self._now = (self._earlier + request, prompt) if sequences == 1 else None

    def on_routing(self, layer: int, experts: Ids) -> None:
        """Record the experts that a layer's router chose in this pass, [tokens, top_k]."""
        if self._now is not None:
            self._rows[layer] = experts.astype(np.uint16)

    def state(self) -> Arrays | None:
        """Return the recorded routing as arrays to store; None if nothing was recorded."""
        self._end()
        if not self._passes:
            return None
        return {
            "experts": np.concatenate([each.experts for each in self._passes]),
            "lengths": np.array([len(each.experts) for each in self._passes], np.int64),
            "requests": np.array([each.request for each in self._passes], np.int64),
            "prompts": np.array([each.prompt for each in self._passes], np.uint8),
        }

    def _end(self) -> None:
        """Record the current forward pass, if the routers of all layers have chosen experts."""
        now, rows, self._rows = self._now, self._rows, {}
        self._now = None
        complete = (
            len(rows) == len(self._sizes) and len({each.shape for each in rows.values()}) == 1
        )
        if now is None or not complete:
            return
        experts = np.stack([rows[layer] for layer in range(len(self._sizes))], axis=1)
        if (experts < np.array(self._sizes)[:, None]).all():
            self._record(RoutedPass(experts[-TOKENS:], *now))

    def _record(self, each: RoutedPass) -> None:
        if self._passes and each.experts.shape[1:] != self._passes[0].experts.shape[1:]:
            return
        self._passes.append(each)
        self._tokens += len(each.experts)
        while self._tokens > TOKENS:
            self._tokens -= len(self._passes.popleft().experts)


def recent_trace(history: RoutingHistory | None, sizes: Sequence[int]) -> Trace | None:
    """Build a trace of the latest routing in a model's history.

    `sizes` are the numbers of experts of the model's layers. None if the history has no such
    routing, or if it does not fit the model.
    """
    state = history.states.get(NAME, {}) if history is not None else {}
    try:
        starts = starts_of(state["lengths"])
        begins = np.diff(state["requests"], prepend=-1) != 0
        return Trace(
            np.asarray(state["experts"]),
            np.array(sizes, np.int64),
            np.append(starts[:-1][begins], starts[-1]),
            starts,
            state["prompts"].astype(np.bool_),
            ("",) * int(begins.sum()),
        )
    except (TraceError, KeyError, IndexError, ValueError, TypeError, AttributeError):
        return None
