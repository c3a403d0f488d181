"""Memory's nodes: host memory that lies by the device that reads it.

On a machine with several NUMA nodes a device hangs at one of them, and what lies at another comes
over the link between them. Which node that is, Linux tells in /sys; pages are asked for there by
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
    """The nodes that this machine has, ascending; [] where Linux does not tell."""
    found = (sys / "devices/system/node").glob("node*")
    return sorted(int(p.name[4:]) for p in found if re.fullmatch(r"node\d+", p.name))


def node_of(pci: str, sys: Path = SYS) -> int | None:
    """The node that a device (`0000:3b:00.0`) hangs at; None where that is not known."""
    try:
        node = int((sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Have the pages within this range, which nothing has touched yet, lie on a node.

    None, or why the system refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known for {platform.machine()}"
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end:
        return None
    libc, bits = ctypes.CDLL(None, use_errno=True), 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // bits] = 1 << node % bits
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(begin), ctypes.c_ulong(end - begin),
        ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(words * bits + 1), ctypes.c_uint(0),
    )  # fmt: skip
    return os.strerror(ctypes.get_errno()) if failed else None


def place(address: int, parts: list[tuple[int, int | None]], sys: Path = SYS) -> None:
    """Have consecutive parts of a reservation, (bytes, node) each, lie on their nodes.

    Nothing is to be done on a machine of one node; what cannot be done is said.
    """
    if len(nodes(sys)) < 2:
        return
    for nbytes, node in parts:
        reason = "the device does not say where it hangs"
        if nbytes and (node is None or (reason := prefer(address, nbytes, node) or "")):
            log.warning(
                "host memory of a device could not be placed at its NUMA node (%s): copies may"
                " cross the link between nodes",
                reason,
            )
        address += nbytes
