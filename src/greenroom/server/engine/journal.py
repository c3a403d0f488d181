"""What every pass was made of: equal batches give equal bits.

A test of that promise needs the passes of a run and no cache of experts in the same state; nothing
of a user's text is in a journal but the numbers of tokens. `benchmarks/passes.py` computes the
passes of a journal again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.server.engine.requests import Request


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """A sequence begins with the first tokens of another."""

    number: int
    source: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pass:
    """So many tokens of these sequences, each after so many before it: (number, before, tokens)."""

    shares: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Journal:
    """The passes of an engine that ended well, in order; `requests` by sequence number."""

    events: list[PrefixReuse | Pass] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
