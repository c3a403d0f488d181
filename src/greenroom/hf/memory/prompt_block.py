"""The number of a prompt's tokens that one forward pass computes."""

from __future__ import annotations

import torch

from greenroom.config import LoadConfig, parse_device
from greenroom.hf.memory.budget import Workspace
from greenroom.hf.model.skeleton import ModelSkeleton

CPU_BLOCK = 512  # tokens; a CPU computes them for longer than most disks take for their experts
GPU_BLOCKS = 8192, 4096, 2048  # a GPU waits for its link: each block reads most missing experts
SHARE = 16  # activations take at most one part in 16 of a GPU's memory


def prompt_block(config: LoadConfig, skeleton: ModelSkeleton, context: int, on_a_gpu: bool) -> int:
    """Return the most tokens of a prompt that a forward pass computes.

    `auto` depends on the model, the context and the GPU's memory, not on what is free of it now, so
    a run that is repeated has the same bits. Without a GPU at hand, when one is planned for, it is
    the least for a GPU.
    """
    if config.prompt_block != "auto":
        return int(config.prompt_block)
    if not on_a_gpu:
        return CPU_BLOCK
    space = Workspace.of(skeleton.model, skeleton.catalog, compiled=False)
    return largest_block(space, context, _gpu_bytes(config))


def largest_block(space: Workspace, context: int, memory: int) -> int:
    """Return the largest of GPU_BLOCKS whose activations take a small share of a GPU's memory.

    memory: bytes of the GPU in all; the least block is returned if none takes so little
    """
    for block in GPU_BLOCKS:
        rows = min(block, context)
        if (space.nbytes(1, rows, context, rows) - space.fixed) * SHARE <= memory:
            return block
    return GPU_BLOCKS[-1]


def _gpu_bytes(config: LoadConfig) -> int:
    """Return the bytes of memory of the smallest GPU of a run; 0 if there is none here."""
    if not torch.cuda.is_available():
        return 0
    numbers = parse_device(config.device)[1]
    return min(torch.cuda.get_device_properties(number).total_memory for number in numbers)
