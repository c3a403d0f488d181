"""Placement of host memory on the NUMA node of the device that reads it.

On a machine with several NUMA nodes a device is attached to one of them; memory of another node
comes over the link between them. Linux tells a device's node in /sys. Pages are requested there by
`mbind`, as a preference: where a node is full they lie elsewhere.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
from pathlib import Path

SYS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFERRED = 1  # MPOL_PREFERRED

log = logging.getLogger(__name__)


def nodes(sys: Path = SYS) -> list[int]:
    """List this machine's NUMA nodes, ascending; [] where Linux does not name any."""
    folders = (sys / "devices/system/node").glob("node*")
    return sorted(int(p.name[4:]) for p in folders if re.fullmatch(r"node\d+", p.name))


def node_of(pci: str, sys: Path = SYS) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None if unknown.

    The address has the form `0000:3b:00.0`.
    """
    try:
        node = int((sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Prefer a NUMA node for a memory range's pages that are still untouched.

    Returns None, or the reason why the system refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"the number of mbind is unknown for {platform.machine()}"
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        return None
    libc, bits = ctypes.CDLL(None, use_errno=True), 8 * ctypes.sizeof(ctypes.c_ulong)
    longs = node // bits + 1
    mask = (ctypes.c_ulong * longs)()
    mask[node // bits] = 1 << node % bits
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(begin), ctypes.c_ulong(end - begin),
        ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(longs * bits + 1), ctypes.c_uint(0),
    )  # fmt: skip
    return os.strerror(ctypes.get_errno()) if failed else None


def place(address: int, parts: list[tuple[int, int | None]], sys: Path = SYS) -> None:
    """Prefer NUMA nodes for consecutive parts of a memory reservation.

    Each part is (bytes, node).

    Failures are logged as warnings. On a machine with one node nothing is done.
    """
    if len(nodes(sys)) < 2:
        return
    for nbytes, node in parts:
        reason = "the device does not tell its node"
        if nbytes and (node is None or (reason := prefer(address, nbytes, node) or "")):
            log.warning(
                "host memory of a device could not be placed at its NUMA node (%s): copies may"
                " cross the link between nodes",
                reason,
            )
        address += nbytes
