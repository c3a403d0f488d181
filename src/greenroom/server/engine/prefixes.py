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

MIN_TOKENS = 16  # tokens that are worth a copy

Ids = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """The keys and values of a request that is over, or runs: `ids` [n] are the tokens that they
    are of, `exact` of them were read in the passes that a request alone would have read them in."""

    ids: Ids
    cache: Any
    nbytes: int = 0
    exact: int = 0
    number: int = -1  # of the sequence that left it


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class PrefixCache:
    """What is kept, within `limit` bytes; 0 keeps nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[PrefixEntry] = []  # used longest ago first
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._entries)

    def touch(self, entry: PrefixEntry) -> None:
        """An entry was copied from."""
        self._entries.remove(entry)
        self._entries.append(entry)

    def pop(self, entry: PrefixEntry) -> Any:
        """Its cache, which is the request's from here on."""
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes
        return entry.cache

    def add(self, entry: PrefixEntry) -> bool:
        """Keep an entry, in place of those that it begins with; False where there is no room."""
        if entry.nbytes > self.limit or entry.ids.size < MIN_TOKENS:
            return False
        for other in list(self._entries):
            shared = common_prefix(other.ids, entry.ids)
            if shared == entry.ids.size and other.exact >= entry.exact:
                self.touch(other)
                return False  # it is there already
            if shared == other.ids.size:
                self.pop(other)
        self.shrink(self.limit - entry.nbytes)
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        return True

    def shrink(self, nbytes: int) -> None:
        """Keep no more than so many bytes; the entry that was used longest ago goes first."""
        while self._entries and self.nbytes > max(0, nbytes):
            self.pop(self._entries[0])
            self.evicted += 1


def as_ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int64)
