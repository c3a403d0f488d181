"""Journal of forward passes: which tokens of which requests each pass computed.

Equal batches give bitwise equal results, whatever the expert cache holds. `benchmarks/passes.py`
checks that: it computes the passes of a journal again. A journal holds token ids, and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.server.engine.requests import Request

DISK = -1  # source of keys and values that an earlier process may have computed


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """A journal record: one request reuses keys and values of another request's first tokens.

    `number` is the sequence number of the reusing request, `source` that of the other, and `tokens`
    the number of reused tokens. The source is DISK if they come from `--prompt-cache`; passes of
    such a journal cannot be computed again.
    """

    number: int
    source: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A journal record of one forward pass: which tokens of which requests were computed.

    `shares` has a tuple for each request: its sequence number, the number of its tokens that were
    computed before, and the number of tokens that the pass computed.
    """

    shares: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Journal:
    """A record of the serving engine's successful forward passes and prefix reuses, in order.

    `requests` maps sequence numbers to requests.
    """

    events: list[PrefixReuse | Pass] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
