"""Compiled kernels on torch's own OpenMP threads.

A second pool of threads would compete with torch's for the cores: workers of both spin after their
work. So a kernel `void(void *)` is started by `GOMP_parallel`, which compilers call for
`#pragma omp parallel`. The function is of the library that torch has loaded (GNU's, or Intel's with
the same symbol). Without such a library the kernel runs on the calling thread only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

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


def find_parallel() -> tuple[Callable[[int, int, int, int], None] | None, int]:
    """Find torch's OpenMP functions that start a parallel region and wait at a barrier.

    Return the function `GOMP_parallel(entry, data, threads, flags)` and the address of the barrier
    function. Return (None, 0) if the process has loaded no OpenMP library.
    """
    for path in _loaded():
        try:
            library = ctypes.CDLL(path)
            parallel, barrier = library.GOMP_parallel, library.GOMP_barrier
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel, ctypes.cast(barrier, ctypes.c_void_p).value or 0
    return None, 0


PARALLEL, BARRIER = find_parallel()


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
        """Run a compiled kernel on all of torch's threads, or (not `wide`) on the caller's alone.

        `argument` is an address. The GIL is released during the call.
        """
        threads = torch.get_num_threads() if wide else 1
        if threads > 1 and PARALLEL is not None:
            PARALLEL(self.address, argument, threads, 0)
        else:
            self._function(argument)


@cache
def kernel_entry(kernel: str, dtype: torch.dtype | None = None) -> KernelEntry:
    """Find a compiled kernel, as the entry of a parallel region.

    It is the C++ function KERNEL_DTYPE, or KERNEL if that has no weight type.
    """
    name = f"{kernel}_{str(dtype).removeprefix('torch.')}" if dtype else kernel
    address = library().address(name)
    assert address, name
    return KernelEntry(address, library())
