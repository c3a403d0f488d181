"""Room for single tokens in KV caches; kernels write their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer

from greenroom.hf.kv.cache import GrowingLayer
from greenroom.hf.kv.in_place import InPlaceLayer, WindowLayer
from greenroom.runtime.cuda.token_graph import LayerStates
from greenroom.runtime.kernels.dense.attention import KeyValueView

_stamp_of = attrgetter("_stamp")


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


def layer_stamps(layers: Sequence[Any]) -> list[int]:
    """Return a number for each layer's tensors, which others never have; empty without tensors.

    Whatever makes other tensors for a layer changes its number.
    """
    try:
        return list(map(_stamp_of, layers))  # of each token: a loop of Python's takes twice as long
    except AttributeError:  # a layer of another kind
        return []


def layer_states(layers: Sequence[Any]) -> list[LayerStates] | None:
    """Return where each layer stores keys and values, with room for a token.

    The result is None if a layer is of another kind, full, or of several sequences.
    """
    states = []
    for layer in layers:
        if type(layer) not in (GrowingLayer, WindowLayer) or layer._buffers is None:
            return None
        if not layer._is_single or layer._count == layer._most:
            return None
        dropped, window = layer.get_seq_length() - layer._count, None
        if type(layer) is WindowLayer:
            window = layer.sliding_window
        keys, values = layer._buffers
        states.append(LayerStates(keys, values, dropped, window))
    return states


def count_token(layers: Sequence[InPlaceLayer]) -> None:
    """Count a token that a kernel has written, in the layers of a KV cache."""
    for layer in layers:
        layer._count += 1
        layer._views = None
