"""Export of routing traces to oracleGeneral, the binary format of the simulator libCacheSim."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from greenroom.policies.opt import next_uses
from greenroom.trace import Trace, stream
from greenroom.trace.container import atomic_file

# A record of the format: libCacheSim/traceReader/customizedReader/oracle/oracleGeneralBin.h.
RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next_use", "<i8")])
LAST_USE = -1


def save_oracle_general(
    trace: Trace, path: str | os.PathLike[str], *, order: str = "natural", size: int = 1
) -> int:
    """Write a trace's expert requests to a file for libCacheSim; return their number.

    A record has 24 bytes, little endian: the time (u4: the token, or the pass in order `runtime`),
    the object (u8: the expert's dense id plus 1, since some algorithms reserve 0), its size in
    bytes (u4) and the number of the next record with this object (i8; -1: there is none).

    order: order of the requests, natural, rounds or runtime (docs/simulate.md)
    size:  bytes of an expert; with 1 a cache of N bytes has N slots

    Pins and layers have no place in the format: libCacheSim simulates one shared cache without
    pins. UnknownName for another order, OutputError if the file cannot be written.
    """
    requests = stream(trace, order)
    count = requests.pieces.size
    records = np.empty(count, RECORD)
    records["time"] = np.repeat(requests.token, np.diff(requests.starts))
    records["object"] = requests.pieces.astype(np.uint64) + 1
    records["size"] = size
    following = next_uses(requests.pieces, int(trace.offsets[-1]))
    records["next_use"] = np.where(following < count, following, LAST_USE)
    with atomic_file(Path(path)) as file:
        file.write(records.data)
    return count
