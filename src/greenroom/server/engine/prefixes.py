"""Keys and values that requests leave, for those that begin alike.

A system prompt, the earlier turns of a conversation: what a request has in common with tokens that
were read before need not be read again, and no experts fetched for it. Each entry is a whole cache
of one sequence. A request that goes on where an entry ends takes it over; one that leaves it
earlier, or finds it in use, gets a copy of what both have. Copies cost memory where blocks that are
shared would not; but the tokens of a sequence lie in one run, which is what one token's attention
reads at the memory's speed. The entry that was used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 16  # tokens that are worth a copy

Ids = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Kept:
    """The keys and values of a request that is over, or runs: `ids` [n] are the tokens that they
    are of, `exact` of them were read in the passes that a request alone would have read them in."""

    ids: Ids
    cache: Any
    nbytes: int = 0
    exact: int = 0
    number: int = -1  # of the sequence that left it


def common(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class Prefixes:
    """What is kept, within `limit` bytes; 0 keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: list[Kept] = []  # used longest ago first
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept)

    def used(self, kept: Kept) -> None:
        """An entry was copied from."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def take(self, kept: Kept) -> Any:
        """Its cache, which is the request's from here on."""
        self._kept.remove(kept)
        self.nbytes -= kept.nbytes
        return kept.cache

    def keep(self, kept: Kept) -> bool:
        """Keep an entry, in place of those that it begins with; False where there is no room."""
        if kept.nbytes > self.limit or kept.ids.size < LEAST:
            return False
        for other in list(self._kept):
            shared = common(other.ids, kept.ids)
            if shared == kept.ids.size and other.exact >= kept.exact:
                self.used(other)
                return False  # it is there already
            if shared == other.ids.size:
                self.take(other)
        self.shrink(self.limit - kept.nbytes)
        self._kept.append(kept)
        self.nbytes += kept.nbytes
        return True

    def shrink(self, nbytes: int) -> None:
        """Keep no more than so many bytes; the entry that was used longest ago goes first."""
        while self._kept and self.nbytes > max(0, nbytes):
            self.take(self._kept[0])
            self.evicted += 1


def as_ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int64)
