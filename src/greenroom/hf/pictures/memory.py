"""Memory that pictures in prompts take, besides the weights of the vision tower."""

from __future__ import annotations

from typing import Any, NamedTuple

from greenroom.hf.pictures.decode import MOST_PIXELS, PIXEL_BYTES
from greenroom.hf.pictures.support import picture_obstacle

WAITING_BYTES = 64 << 20  # of the pixels of all requests, from their arrival to their end
CHANNELS = 3


class PictureBytes(NamedTuple):
    """Bytes that pictures take: pixels in main memory, activations where the model computes."""

    pixels: int
    activations: int


def waiting_bytes(model: Any, context: int) -> int:
    """Return the most bytes of pixels of all requests; those of one full context always fit."""
    vision = model.config.vision_config
    token = CHANNELS * (vision.patch_size * vision.spatial_merge_size) ** 2
    return max(WAITING_BYTES, context * token)


def picture_bytes(model: Any, context: int, most_tokens: int, block: int) -> PictureBytes:
    """Return the bytes that a server needs for pictures; 0 if the model takes none.

    most_tokens: of a picture; larger ones are scaled down
    block: most tokens of a prompt in a pass, whose pictures are in memory besides a longer one

    They are: one picture that is decoded, and the pixels of requests; the activations of the vision
    tower for one picture, and hidden states of pictures in a pass. The model may be on the meta
    device.
    """
    if picture_obstacle(model, most_tokens):
        return PictureBytes(0, 0)
    vision = model.config.vision_config
    tokens = min(context, most_tokens)
    states = (tokens + block) * (1 + len(vision.deepstack_visual_indexes))
    hidden = states * vision.out_hidden_size * model.dtype.itemsize
    pixels = MOST_PIXELS * PIXEL_BYTES + waiting_bytes(model, context)
    return PictureBytes(pixels, tower_bytes(model, tokens) + hidden)


def tower_bytes(model: Any, tokens: int) -> int:
    """Return the bytes of the vision tower's activations for a picture of `tokens` tokens."""
    vision, size = model.config.vision_config, model.dtype.itemsize
    patch = CHANNELS * vision.temporal_patch_size * vision.patch_size**2
    # The pixels in float32, scaled and normalised in two copies each.
    pixels = patch * (4 * 4 + size)
    # In a block: the residual, its norm, and then either attention or the MLP. Attention: queries,
    # keys and values, and float32 copies of queries and keys with three temporary ones.
    attention = vision.hidden_size * (5 * size + 5 * 4 + 4)
    mlp = 2 * vision.intermediate_size * size
    block = 3 * vision.hidden_size * size + max(attention, mlp)
    return tokens * vision.spatial_merge_size**2 * (pixels + block)
