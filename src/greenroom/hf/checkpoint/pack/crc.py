"""CRC-32 of runs of bytes, and of what they make together, as zlib's `crc32_combine` does it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest bit is x^31
ONE = 1 << 31  # x^0


Runs = Sequence[tuple[int, int]]  # (first byte, bytes) of what has a checksum of its own


def checksums(runs: Runs, data: memoryview) -> tuple[int, ...]:
    """Of an expert's bytes: one of each run."""
    return tuple(zlib.crc32(data[begin : begin + length]) for begin, length in runs)


def of_run(runs: Runs, crc32: Sequence[int], begin: int, end: int) -> int:
    """The checksum of bytes begin .. end, from those of the runs that they are."""
    whole = 0
    for (at, length), crc in zip(runs, crc32, strict=True):
        if begin <= at < end:
            whole = joined(whole, crc, length)
    return whole


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
