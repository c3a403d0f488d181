"""The libraries of compiled kernels that this processor runs."""

from __future__ import annotations

import torch

from greenroom.runtime.kernels.launch.openmp import KernelEntry
from greenroom.runtime.kernels.native.library import FOLDER, VARIANTS, Library

PATHS = [FOLDER / f"greenroom-{variant}.so" for variant in VARIANTS]
LIBRARIES = [each for each in map(Library, filter(lambda p: p.exists(), PATHS)) if each.runs_here]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def entries(name: str, dtype: torch.dtype) -> list[KernelEntry]:
    """A kernel of each library."""
    symbol = f"{name}_{str(dtype).removeprefix('torch.')}"
    return [KernelEntry(each.address(symbol), each) for each in LIBRARIES]


def same_bits(results: list[torch.Tensor]) -> bool:
    """Have all results the same bits?"""
    first, *others = (each.contiguous().view(torch.uint8) for each in results)
    return all(torch.equal(first, each) for each in others)
