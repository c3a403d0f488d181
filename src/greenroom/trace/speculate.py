"""Traces as they would be with speculation: some decode passes have several tokens.

The drafts are those of a run with `--speculate lookup`, from each request's own tokens. A draft
token that is right has the experts that the trace recorded for it. The experts of a wrong one were
never recorded; those of the last occurrence of this token in the request stand for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.speculation.drafts import LONGEST
from greenroom.core.speculation.speculation import Speculation
from greenroom.errors import UsageError
from greenroom.trace.trace import Trace, starts_of

# Expected seconds of a pass, for its number of tokens and of different experts in all layers.
PassSeconds = Callable[[int, int], float]


@dataclass(slots=True)
class _Passes:
    """Passes with drafts: the trace's tokens of which they consist."""

    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)  # tokens that each pass gave its text
    prefill: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], new: int, prefill: bool = False) -> None:
        self.tokens += tokens
        self.lengths.append(len(tokens))
        self.new.append(new)
        self.prefill.append(prefill)


def speculate(trace: Trace, seconds: PassSeconds) -> Trace:
    """Return a trace whose decode passes verify drafts, where `seconds` make them worth it.

    UsageError if the trace has no token ids.
    """
    if trace.token_ids is None:
        raise UsageError(
            "--speculate drafts tokens by their ids, which this trace does not have: record one"
            " with `greenroom trace record --token-ids`"
        )
    speculation, passes, lengths = Speculation(LONGEST + 1), _Passes(), []
    for request in range(trace.requests):
        before = len(passes.tokens)
        _add_request(trace, request, speculation, seconds, passes)
        lengths.append(len(passes.tokens) - before)
    return replace(
        trace,
        **trace._rows(np.array(passes.tokens, np.int64)),
        request_starts=starts_of(np.array(lengths)),
        pass_starts=starts_of(np.array(passes.lengths)),
        pass_prefill=np.array(passes.prefill),
        new_tokens=np.array(passes.new, np.int64),
    )


def _add_request(
    trace: Trace, request: int, speculation: Speculation, seconds: PassSeconds, passes: _Passes
) -> None:
    """Add the passes of one request."""
    assert trace.token_ids is not None
    end, ids = int(trace.request_starts[request + 1]), trace.token_ids
    first, last = trace.first_passes[request : request + 2].tolist()
    at = int(trace.pass_starts[first])
    for number in range(first, last):  # the prompt
        stop = int(trace.pass_starts[number + 1])
        if not trace.pass_prefill[number]:
            break
        passes.add(list(range(at, stop)), 1, prefill=True)
        at = stop
    drafter = speculation.drafter(ids[trace.request_starts[request] : at].tolist())
    latest = {int(ids[i]): i for i in range(int(trace.request_starts[request]), at)}
    new = 1
    while at < end:
        read = range(at - new + 1, at + 1)
        text = [int(ids[i]) for i in read]
        latest |= dict(zip(text, read, strict=True))
        drafter.extend(text)
        drafts = speculation.choose([drafter], [end - at - 1])
        right = 0
        while right < len(drafts[0]) and drafts[0][right] == ids[at + 1 + right]:
            right += 1
        tokens = [*range(at, at + right + 1), *(latest[each] for each in drafts[0][right:])]
        passes.add(tokens, new := right + 1)
        speculation.record(drafts, new, seconds(len(tokens), _different(trace, tokens)))
        at += new


def _different(trace: Trace, tokens: list[int]) -> int:
    """Count the different experts of some tokens, in all layers."""
    ids: Ints = trace.experts[tokens] + trace.offsets[:-1, None]
    return int(np.unique(ids).size)
