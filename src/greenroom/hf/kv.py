"""Room for one more token in a KV cache, without copying the tokens before it.

transformers' `DynamicCache` makes new tensors of all keys and values for every token: with 190
tokens of context 0.2 ms a layer, and more as the context grows. Here a layer's tensors become
views of larger ones with room for `SPARE` tokens, so that only every 64th token copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

SPARE = 64  # tokens
_ROOM = "_greenroom_room"  # on a layer: ((view, whole) of the keys, the same of the values)


def reserve(cache: Any, layer_idx: int) -> tuple[Tensor, Tensor] | None:
    """Add a token to a layer: its keys and values [1, heads, tokens, width], the last one unset.

    None where the cache is of another kind, empty, or holds several requests.
    """
    if type(cache) is not DynamicCache or cache.offloading or layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.shape[0] != 1:
        return None
    keys, values = layer.__dict__.get(_ROOM, ((None, None), (None, None)))
    keys, values = _grown(layer.keys, *keys), _grown(layer.values, *values)
    setattr(layer, _ROOM, (keys, values))
    layer.keys, layer.values = keys[0], values[0]
    return keys[0], values[0]


def _grown(tensor: Tensor, view: Tensor | None, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """One more token for `tensor`: in `whole` where it is a view of that with room, else a copy."""
    tokens = tensor.shape[2]
    if whole is None or tensor is not view or tokens == whole.shape[2]:
        shape = (*tensor.shape[:2], tokens + SPARE, tensor.shape[3])
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        whole[:, :, :tokens] = tensor
    return whole[:, :, : tokens + 1], whole
