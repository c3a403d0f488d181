"""Several compiled bodies in one parallel region, whose threads wait for each other between them.

To start a region and to come back from it to Python costs more than a small body's own work. What
one body writes the next one may read, since all are told beforehand where it lies.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch

from greenroom.runtime.kernels.codegen.entries import layers
from greenroom.runtime.kernels.launch.openmp import BARRIER, KernelEntry, kernel_entry

Stage = tuple[KernelEntry, "array[int]"]  # a body, and the words that it is entered with


def bits(value: float) -> int:
    """A float32's bits, as a word holds them."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def of_rows(
    body_of_rows: KernelEntry, each: Sequence[array[int]], wide: int = 0, out: int = 0
) -> Stage:
    """A stage for several tokens, from the words that a body for one would have for each, and the
    addresses of float32 matrices of what goes in and what comes out."""
    words = array("q", (0, 0, len(each), wide, out))
    words.extend(argument.buffer_info()[0] for argument in each)
    return body_of_rows, words


def run(stages: Sequence[Stage]) -> None:
    """Do the stages, one after the other, each with all of torch's threads."""
    words = array("q", (len(stages), BARRIER))
    for each, argument in stages:
        words.append(each.address)
        words.append(argument.buffer_info()[0])
    kernel_entry(layers.run_stages, torch.float32)(words.buffer_info()[0])
