"""A store that compares an expert's bytes with its checksum when it is first read.

The CRC-32 of a chunk is computed by the thread that has read it, outside the interpreter's lock, at
about three times a fast disk's speed; once in a process for each expert. Chunks arrive in any
order: their checksums are joined as zlib's `crc32_combine` does it.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from functools import lru_cache

import numpy as np

from greenroom.core.layout import Catalog
from greenroom.errors import StoreError
from greenroom.hf.pack.format import PackCatalog
from greenroom.runtime.copier import Store
from greenroom.runtime.store import Chunk, Staging

POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest bit is x^31
ONE = 1 << 31  # x^0


def checked(store: Store, catalog: Catalog) -> Store:
    """A store whose experts are compared with their checksums, where the catalog has any."""
    return CheckedStore(store, catalog) if isinstance(catalog, PackCatalog) else store


class CheckedStore:
    """Another store, of a pack. Thread-safe.

    `read` raises StoreError, which names the expert and the command that mends it, when the last
    chunk of a damaged expert is read: so it is never computed with.
    """

    def __init__(self, store: Store, catalog: PackCatalog) -> None:
        self._store, self._catalog = store, catalog
        self._begins = [catalog.extents(e)[0].offset for e in range(catalog.experts)]
        self._right = np.zeros(catalog.experts, bool)
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}  # id -> start -> (length, CRC-32)
        self._lock = threading.Lock()

    def chunks(self, expert_id: int) -> tuple[Chunk, ...]:
        """An expert's chunks, in the order in which they are read."""
        return self._store.chunks(expert_id)

    def read(self, chunk: Chunk, staging: Staging) -> np.ndarray:
        """A chunk's bytes, as the store gives them."""
        data = self._store.read(chunk, staging)
        expert = bisect_right(self._begins, chunk.extent.offset) - 1
        if not self._right[expert]:
            self._add(expert, chunk, zlib.crc32(data.data))
        return data

    def _add(self, expert: int, chunk: Chunk, crc: int) -> None:
        with self._lock:
            parts = self._parts.setdefault(expert, {})
            parts[chunk.start] = chunk.length, crc
            if sum(length for length, _ in parts.values()) < chunk.extent.length:
                return
            del self._parts[expert]
        whole = 0
        for _, (length, crc) in sorted(parts.items()):
            whole = joined(whole, crc, length)
        if whole != self._catalog.crc32[expert]:
            raise StoreError(self._catalog.damaged(expert))
        self._right[expert] = True

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes from those of each; `length` is the second's."""
    return _product(_power(length), first) ^ second


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    power, square, n = ONE, ONE >> 8, nbytes
    while n:
        if n & 1:
            power = _product(square, power)
        square, n = _product(square, square), n >> 1
    return power


def _product(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product
