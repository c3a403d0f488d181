"""Compiled kernels on torch's own OpenMP threads.

A second pool of threads would compete with torch's for the cores: workers of both spin after their
work. So a kernel `void(void *)` is started by `GOMP_parallel`, which compilers call for
`#pragma omp parallel`. The function is of the library that torch has loaded (GNU's, or Intel's with
the same symbol). Without such a library the kernel runs on the calling thread only. While other
programs use the cores, fewer threads than torch's enter a kernel (launch/governor.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from greenroom.runtime.kernels.launch.governor import Governor
from greenroom.runtime.kernels.native.library import library

_NAMES = ("libgomp", "libiomp5", "libomp")


def _loaded() -> list[str]:
    """Return the OpenMP libraries mapped into this process, torch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    libraries = sorted(path for path in paths if Path(path).name.startswith(_NAMES))
    return sorted(libraries, key=lambda path: "torch" not in path)


def find_parallel() -> Callable[[int, int, int, int], None] | None:
    """Find torch's OpenMP function that starts a parallel region.

    Return `GOMP_parallel(entry, data, threads, flags)`, or None if the process has loaded no OpenMP
    library.
    """
    for path in _loaded():
        try:
            parallel: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


PARALLEL = find_parallel()
GOVERNOR = Governor()


class KernelEntry:
    """A compiled function `void(void *)` that several OpenMP threads enter with one argument.

    `address` is the address of its machine code.
    """

    __slots__ = ("_function", "_owner", "address")

    def __init__(self, address: int, owner: object = None) -> None:
        self.address = address
        self._owner = owner  # keeps the machine code alive
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, argument: int, wide: bool = True) -> None:
        """Run a compiled kernel on torch's threads, or (not `wide`) on the caller's alone.

        `argument` is an address. The GIL is released during the call.
        """
        full = torch.get_num_threads() if wide else 1
        if full == 1 or PARALLEL is None:
            self._function(argument)
            return
        now = perf_counter()
        threads = GOVERNOR.threads(full, now)
        if threads == 1:
            self._function(argument)
        elif GOVERNOR.due(now):
            GOVERNOR.record(self._measure(argument, threads), perf_counter())
        else:
            PARALLEL(self.address, argument, threads, 0)

    def _measure(self, argument: int, threads: int) -> dict[int, int]:
        """Run a kernel; return how long its threads have waited for a core, in nanoseconds."""
        assert PARALLEL is not None
        structure = library().structure
        waits = (structure("Waiting") * threads)()
        call = structure("MeasuredCall")(
            kernel=self.address, call=argument, threads=ctypes.addressof(waits)
        )
        PARALLEL(library().address("run_measured"), ctypes.addressof(call), threads, 0)
        return {each.thread: each.nanoseconds for each in waits[: call.count]}


@cache
def kernel_entry(kernel: str, dtype: torch.dtype | None = None) -> KernelEntry:
    """Find a compiled kernel, as the entry of a parallel region.

    It is the C++ function KERNEL_DTYPE, or KERNEL if that has no weight type.
    """
    name = f"{kernel}_{str(dtype).removeprefix('torch.')}" if dtype else kernel
    address = library().address(name)
    assert address, name
    return KernelEntry(address, library())
