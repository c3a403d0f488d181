"""Placement of host memory on the NUMA node of the device that reads the memory.

On a machine with several NUMA nodes a device is attached to one of them; reads of another node's
memory cross the link between the nodes. Linux has each device's node in /sys. The node is set by
`mbind` as a preference: if it is full, pages are allocated on another node.
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
    """Return the numbers of this machine's NUMA nodes, ascending; [] if Linux names none."""
    folders = (sys / "devices/system/node").glob("node*")
    return sorted(int(p.name[4:]) for p in folders if re.fullmatch(r"node\d+", p.name))


def node_of(pci: str, sys: Path = SYS) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None if unknown.

    `pci` is the device's address, as `0000:3b:00.0`.
    """
    try:
        node = int((sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Set the preferred NUMA node of a memory range's pages, before they are allocated.

    Returns None, or the reason why the system refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"the number of the system call mbind is unknown for {platform.machine()}"
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
    """Set the preferred NUMA nodes of consecutive parts of memory from `address` on.

    Each part is (bytes, node); the node is None if it is unknown. Failures are logged as warnings.
    On a machine with one node, nothing is done.
    """
    if len(nodes(sys)) < 2:
        return
    for nbytes, node in parts:
        reason = "the device's node is unknown"
        if nbytes and (node is None or (reason := prefer(address, nbytes, node) or "")):
            log.warning(
                "host memory could not be placed on the NUMA node of its GPU (%s): copies to the"
                " GPU may be slower, since they may cross the link between nodes",
                reason,
            )
        address += nbytes
