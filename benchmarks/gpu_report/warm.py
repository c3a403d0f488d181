"""Compile a share of the table's kernels: `warm.py NUMBER COUNT`; or take small steps: `small`."""

from __future__ import annotations

import sys

import machine
import torch
from kernel_cells import compiled
from kernel_layers import Layer, choices, inputs, whole_step
from shapes import ENCODINGS, SMALL_KERNELS

from greenroom.runtime.kernels.triton import TritonKernel


@torch.inference_mode()
def small_steps() -> None:
    """Steps of one token and of many, in every encoding, of a tiny shape."""
    device, shape = machine.device(smoke=False), SMALL_KERNELS["qwen3-30b-a3b"]
    for encoding in ENCODINGS:
        layer = Layer.make(shape, encoding, device, most=1 << 20)
        for tokens in (1, 40):
            x, weights = inputs(shape, tokens, device)
            whole_step(TritonKernel(), layer, x, weights, choices(shape, tokens, 1)[0])
    machine.synchronize(device)
    print("small steps: done")


if __name__ == "__main__":
    if sys.argv[1] == "small":
        small_steps()
    else:
        compiled(int(sys.argv[1]), int(sys.argv[2]))
