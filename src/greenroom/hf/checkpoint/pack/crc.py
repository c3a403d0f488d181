"""CRC-32 of concatenated runs of bytes from their own CRCs, like zlib's `crc32_combine`."""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest bit is x^31
ONE = 1 << 31  # x^0


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated runs of bytes from their own CRC-32s.

    `length` is the number of bytes of the second run.
    """
    return _product(_power(length), first) ^ second


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """Return x^(8 nbytes) modulo the polynomial of CRC-32."""
    power, square, n = ONE, ONE >> 8, nbytes
    while n:
        if n & 1:
            power = _product(square, power)
        square, n = _product(square, square), n >> 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product
