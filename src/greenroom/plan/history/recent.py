"""The routing of the latest tokens: a state of the history of a model's routing.

Plans without a recording go by it (plan/workload.py), and so do the defaults of a run. Passes of
single sequences are noted; a pass of several sequences mixes their tokens and is not. Ids of
experts only: no text, no token, no weight.
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

NAME = "recent"  # of the state
TOKENS = 4096  # that are kept, the latest


class RoutedPass(NamedTuple):
    """One sequence's: experts are [tokens, layers, top_k] ids within their layers."""

    experts: np.ndarray
    request: int
    prompt: bool


class RecentRouting:
    """Notes passes until there are TOKENS, and forgets the oldest after that."""

    def __init__(self, offsets: Sequence[int], history: RoutingHistory | None) -> None:
        """`offsets` [layers + 1] are the dense ids at which layers begin."""
        self._sizes = [b - a for a, b in pairwise(offsets)]
        self._passes: deque[RoutedPass] = deque()
        self._tokens, self._earlier = 0, 0
        self._now: tuple[int, bool] | None = None  # request and kind of the pass that is noted
        self._rows: dict[int, Ids] = {}
        if (trace := recent_trace(history, self._sizes)) is not None:
            parts = np.split(trace.experts, trace.pass_starts[1:-1])
            for each in zip(
                parts, trace.pass_requests.tolist(), trace.pass_prefill.tolist(), strict=True
            ):
                self._note(RoutedPass(*each))
            self._earlier = trace.requests

    def on_pass(self, request: int, prompt: bool, sequences: int) -> None:
        """A pass of so many sequences begins; the one before has ended."""
        self._end()
        self._now = (self._earlier + request, prompt) if sequences == 1 else None

    def on_choice(self, layer: int, experts: Ids) -> None:
        """A layer's router has chosen these experts, [tokens, top_k]."""
        if self._now is not None:
            self._rows[layer] = experts.astype(np.uint16)

    def state(self) -> Arrays | None:
        """What is stored; None where nothing was noted."""
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
        """Note the pass whose layers have chosen, where that is all of them."""
        now, rows, self._rows = self._now, self._rows, {}
        self._now = None
        complete = (
            len(rows) == len(self._sizes) and len({each.shape for each in rows.values()}) == 1
        )
        if now is None or not complete:
            return
        experts = np.stack([rows[layer] for layer in range(len(self._sizes))], axis=1)
        if (experts < np.array(self._sizes)[:, None]).all():
            self._note(RoutedPass(experts[-TOKENS:], *now))

    def _note(self, each: RoutedPass) -> None:
        if self._passes and each.experts.shape[1:] != self._passes[0].experts.shape[1:]:
            return
        self._passes.append(each)
        self._tokens += len(each.experts)
        while self._tokens > TOKENS:
            self._tokens -= len(self._passes.popleft().experts)


def recent_trace(history: RoutingHistory | None, sizes: Sequence[int]) -> Trace | None:
    """The passes that were noted as a recording of a model whose layers have so many experts; None
    where there are none, or those of another model."""
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
