"""The libraries of compiled kernels that this processor runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from greenroom.runtime.kernels.launch.openmp import KernelEntry
from greenroom.runtime.kernels.native.library import FOLDER, VARIANTS, Library

PATHS = [FOLDER / f"greenroom-{variant}.so" for variant in VARIANTS]
LIBRARIES = [each for each in map(Library, filter(lambda p: p.exists(), PATHS)) if each.runs_here]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _pair_instruction(of: Library) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(of.address("pair_instruction"))


# The forms in which each library multiplies pairs of bfloat16: by an instruction, by two FMAs.
PAIR_FORMS = {
    of.variant: (True, False) if _pair_instruction(of).value else (False,) for of in LIBRARIES
}


@contextmanager
def pair_form(of: Library, by_instruction: bool) -> Iterator[None]:
    """Let a library multiply pairs of bfloat16 by the processor's instruction, or by FMAs."""
    form = _pair_instruction(of)
    before, form.value = form.value, by_instruction
    try:
        yield
    finally:
        form.value = before


def entries(name: str, dtype: torch.dtype) -> list[KernelEntry]:
    """A kernel of each library."""
    symbol = f"{name}_{str(dtype).removeprefix('torch.')}"
    return [KernelEntry(each.address(symbol), each) for each in LIBRARIES]


def same_bits(results: list[torch.Tensor]) -> bool:
    """Have all results the same bits?"""
    first, *others = (each.contiguous().view(torch.uint8) for each in results)
    return all(torch.equal(first, each) for each in others)
