"""Prefix cache: keys and values of earlier requests, for requests with a common prefix.

A system prompt or the earlier turns of a conversation need not be computed again, and no experts
are fetched for them. Each entry is the complete cache of one sequence. A request that continues
where an entry ends takes the entry over; a request that shares only a part of it, or finds it in
use, gets a copy of the common part. Copies take memory that shared blocks would not; but the keys
and values of a sequence are contiguous, so that attention reads them at memory bandwidth. The
least recently used entry is evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_TOKENS = 16  # shorter prefixes are not worth a copy

Ids = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """Entry of the prefix cache: the tokens of one request, and their keys and values.

    `cache` is a transformers KV cache of `nbytes` bytes. The first `exact` tokens were computed in
    the same prefill chunks as if the request were alone. `saved` are the segment files on disk that
    have the keys and values of the first tokens, bit by bit. `variant` is that of the model.
    """

    ids: Ids
    cache: Any
    nbytes: int = 0
    exact: int = 0
    number: int = -1  # the sequence number of the request
    saved: tuple[Any, ...] = ()
    variant: int = 0


def common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class PrefixCache:
    """LRU cache of the keys and values of earlier requests, of at most `limit` bytes.

    A limit of 0 turns the cache off.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[PrefixEntry] = []  # least recently used first
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._entries)

    def __contains__(self, entry: object) -> bool:
        return any(each is entry for each in self._entries)

    def touch(self, entry: PrefixEntry) -> None:
        """Mark an entry of the prefix cache as the most recently used."""
        self._entries.remove(entry)
        self._entries.append(entry)

    def pop(self, entry: PrefixEntry) -> Any:
        """Remove an entry from the prefix cache and return the entry's KV cache."""
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes
        return entry.cache

    def add(self, entry: PrefixEntry) -> bool:
        """Add an entry to the prefix cache; return False if it was refused.

        Refused are entries of fewer than MIN_TOKENS tokens, entries larger than the cache, and
        prefixes of another entry. The new entry replaces entries that are prefixes of it. Variants
        of the model share nothing.
        """
        if entry.nbytes > self.limit or entry.ids.size < MIN_TOKENS:
            return False
        for other in [each for each in self._entries if each.variant == entry.variant]:
            shared = common_prefix(other.ids, entry.ids)
            if shared == entry.ids.size and other.exact >= entry.exact:
                self.touch(other)
                return False  # the cache has it already
            if shared == other.ids.size:
                self.pop(other)
        self.shrink(self.limit - entry.nbytes)
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        return True

    def shrink(self, nbytes: int) -> None:
        """Evict least recently used entries until the prefix cache has at most `nbytes` bytes."""
        while self._entries and self.nbytes > max(0, nbytes):
            self.pop(self._entries[0])
            self.evicted += 1


def as_ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int64)
