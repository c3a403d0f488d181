"""Journal of passes: which tokens of which sequences each pass computed.

Equal batches give equal bits, whatever the expert cache holds. `benchmarks/passes.py` checks that:
it computes the passes of a journal again. A journal holds token ids, and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.server.engine.requests import Request


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """A record that a sequence reuses keys and values of another sequence's first tokens."""

    number: int
    source: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A record of one forward pass: which tokens of which sequences were computed.

    `shares` has (sequence number, tokens before, tokens computed) of each sequence.
    """

    shares: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Journal:
    """A record of an engine's successful forward passes and its requests, in order.

    `requests` are by sequence number.
    """

    events: list[PrefixReuse | Pass] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
