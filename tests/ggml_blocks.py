"""Random blocks of every ggml type, under scales that are chosen.

What llama.cpp writes has only some of the possible bytes, and gguf-py can only expand most types.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.layout import BLOCKS

# Encoding -> bytes of a block at which a float16 scale or minimum begins. iq1_m has one in
# four quarters from there on; gguf_mxfp4 begins with a power of two, gguf_nvfp4 with e4m3 scales.
HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s"), (0,)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq1_m": (48,),
    "gguf_mxfp4": (),
    "gguf_nvfp4": (),
}
# What a scale is divided by, so that weights have about a trained model's size.
LARGE = {
    "q8_0": 1000,
    "q4_0": 60,
    "q5_0": 120,
    "q4_1": 100,
    "q5_1": 200,
    "q2_k": 300,
    "q3_k": 800,
    "q4_k": 6000,
    "q5_k": 12000,
    "q6_k": 25000,
    "iq4_nl": 800,
    "iq4_xs": 25000,
    "iq2_xxs": 1000,
    "iq2_xs": 1000,
    "iq2_s": 1000,
    "iq3_xxs": 3000,
    "iq3_s": 3000,
    "iq1_s": 100,
    "iq1_m": 100,
    "tq1_0": 7,
    "tq2_0": 7,
}
GGML = tuple(HALVES)


def random_bytes(name: str, count: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of any bytes: [count, bytes]."""
    return random.integers(0, 256, (count, BLOCKS[name][1]), np.uint8)


def set_scales(name: str, blocks: np.ndarray, at: int, scales: np.ndarray) -> None:
    """Write a float16 to each block, at a byte that HALVES has."""
    scales = scales.astype(np.float16)
    if name != "iq1_m":
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
        return
    for quarter in range(4):
        bits = (scales.view(np.uint16) >> 4 * quarter & 15).astype(np.uint8)
        byte = blocks[:, 49 + 2 * quarter]
        byte[:] = byte & 15 | bits << 4


def sane_scales(name: str, blocks: np.ndarray, random: np.random.Generator) -> None:
    """Write scales of about a trained model's size, of either sign."""
    if name == "gguf_mxfp4":
        blocks[:, 0] = random.integers(118, 128, len(blocks))
        blocks[0, 0] = 1
    if name == "gguf_nvfp4":
        blocks[:, :4] = random.integers(0, 40, (len(blocks), 4))
    for at in HALVES[name]:
        set_scales(name, blocks, at, random.normal(size=len(blocks)) / LARGE[name])
