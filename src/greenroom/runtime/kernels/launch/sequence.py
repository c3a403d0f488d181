"""Run several compiled kernels in one OpenMP parallel region, one after another.

Starting a region and returning to Python costs more than a small kernel's own work. A kernel may
read what an earlier one has written: the address of that result is known before it is computed.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

from greenroom.runtime.kernels.launch.openmp import KernelEntry, kernel_entry
from greenroom.runtime.kernels.native.library import library

Arguments: TypeAlias = "ctypes.Structure | array[int]"
Stage = tuple[KernelEntry, Arguments]


def address_of(arguments: Arguments) -> int:
    """Return the address of a kernel's arguments."""
    if isinstance(arguments, ctypes.Structure):
        return ctypes.addressof(arguments)
    return arguments.buffer_info()[0]


def batch_stage(
    entry: KernelEntry, token_arguments: Sequence[Arguments], wide: int = 0, out: int = 0
) -> Stage:
    """Merge one kernel's arguments for several tokens into one kernel call.

    entry: the variant of the kernel for several tokens
    wide, out: addresses of float32 inputs and outputs with a row per token; 0: none
    """
    structure = library().structure("TokensCall")
    nbytes = ctypes.sizeof(structure)
    arguments = array("q", [*bytes(nbytes // 8), *map(address_of, token_arguments)])
    call = structure.from_buffer(arguments)
    call.tokens, call.wide, call.out = len(token_arguments), wide, out
    call.calls = ctypes.addressof(call) + nbytes  # the list follows in the same memory
    return entry, call


def run(stages: Sequence[Stage]) -> None:
    """Run kernel calls one after another, each on all of torch's threads."""
    launch(
        array("q", [n for entry, arg in stages for n in (entry.address, address_of(arg))]),
        len(stages),
    )


def launch(addresses: array[int], count: int) -> None:
    """Run kernel calls whose addresses (of the kernel, of its arguments) are in an array."""
    structure, run_stages = _launcher()
    call = structure(count=count, stages=addresses.buffer_info()[0])
    run_stages(ctypes.addressof(call))


@cache
def _launcher() -> tuple[Any, KernelEntry]:
    """Find the kernel that runs stages, and the structure of its arguments."""
    return library().structure("StagesCall"), kernel_entry("run_stages")
