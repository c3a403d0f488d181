"""Room for single tokens in KV caches; kernels write their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from greenroom.hf.kv.cache import GrowingLayer
from greenroom.runtime.kernels.dense.attention import KeyValueView


def append_token(cache: Any, layer_idx: int) -> KeyValueView | None:
    """Add room for one token to a layer of a KV cache.

    A kernel writes the token's keys and values later. Returns the layer's tensors and its new
    number of tokens. If the cache is of another kind, empty, or of several sequences, it is not
    changed, and the result is None.
    """
    if type(cache) is not DynamicCache or cache.offloading or layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer:
        layer = cache.layers[layer_idx] = GrowingLayer.of(layer)
    if not isinstance(layer, GrowingLayer) or not layer.is_initialized:
        return None
    return layer.append_token()


def remove_token(cache: Any, layer_idx: int) -> None:
    """Remove the last token, which `append_token` added, from one layer of a KV cache."""
    cache.layers[layer_idx].crop(-1)


def token_buffers(layers: Sequence[Any]) -> list[tuple[Tensor, Tensor]] | None:
    """Return each layer's tensors of keys and of values, with room for a token.

    The result is None if a layer is of another kind, full, or of several sequences.
    """
    buffers = []
    for layer in layers:  # of each token: a method's call would take as long as all of this
        if type(layer) is not GrowingLayer or layer._buffers is None or not layer._is_single:
            return None
        if layer._count == layer._most:
            return None
        buffers.append(layer._buffers)
    return buffers


def count_token(layers: Sequence[GrowingLayer]) -> None:
    """Count a token that a kernel has written, in the layers of a KV cache."""
    for layer in layers:
        layer._count, layer._views = layer._count + 1, None
