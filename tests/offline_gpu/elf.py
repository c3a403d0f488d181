"""Read the instructions of a function from a cubin, which is an ELF file of 64 bits."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<IIQQQQ")  # of a section: name, type, flags, address, first byte, bytes


def function(cubin: bytes) -> bytes:
    """Return the instructions of a cubin's only function."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [HEADER.unpack_from(cubin, table + i * size) for i in range(count)]
    first = sections[names][4]
    found = [
        cubin[at : at + nbytes]
        for name, _, _, _, at, nbytes in sections
        if cubin[first + name :].startswith(b".text.")
    ]
    assert len(found) == 1
    return found[0]
