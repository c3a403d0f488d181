"""Keys and values as bytes: which KV caches can be stored by token ranges, and how.

A layer with full attention has keys and values of each token, which are stored range by range. A
sliding-window layer drops old tokens, so it has a *window state*: the keys and values of its last
tokens, which are complete only for the exact number of tokens at which they were taken. A window
that is longer than the context never drops any, so such a layer counts as full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from greenroom.hf.kv.batch import has_dynamic_cache
from greenroom.hf.kv.cache import GrowingLayer
from greenroom.hf.kv.kinds import OFFLOADED

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Type and shape, [heads, tokens, width], of stored keys or values of one layer."""

    dtype: torch.dtype
    heads: int
    tokens: int
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> StoredBlock:
        """Return the block that a tensor of this type and shape takes."""
        heads, tokens, width = tensor.shape
        return cls(tensor.dtype, heads, tokens, width)

    @property
    def nbytes(self) -> int:
        return self.heads * self.tokens * self.width * self.dtype.itemsize

    def tensor(self, data: Bytes) -> Tensor:
        """View a block's bytes as a tensor, [heads, tokens, width]."""
        flat = torch.from_numpy(data).view(self.dtype)
        return flat.view(self.heads, self.tokens, self.width)


def refusal_reason(model: Any) -> str:
    """Return why a model's KV cache cannot be stored, or an empty string."""
    name, kind = type(model).__name__, model.greenroom.setup.keys_values.kind.name
    if kind == OFFLOADED:
        return f"--kv {kind} has keys and values of another form: leave out --kv"
    if not has_dynamic_cache(model):
        return f"the KV cache of {name} does not store keys and values token by token"
    return ""


def window_lengths(model: Any, context: int) -> tuple[int, ...]:
    """Return the most tokens of each layer's window state; 0 for full attention.

    `context` is the most tokens of a sequence.
    """
    layers = DynamicCache(config=model.config).layers
    windows = [getattr(layer, "sliding_window", None) or 0 for layer in layers]
    return tuple(window - 1 if 0 < window <= context else 0 for window in windows)


def tensors_of(cache: Any, windows: Sequence[int]) -> list[Tensor]:
    """Return each layer's keys and values in turn, [heads, tokens, width], as they are stored.

    The list is empty if a layer has none, or has another number of layers than `windows`.
    """
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if len(pairs) != len(windows) or any(each is None for pair in pairs for each in pair):
        return []
    return [each[0] for pair in pairs for each in pair]


def token_range(
    tensors: Sequence[Tensor], windows: Sequence[int], begin: int, end: int, is_last: bool
) -> list[Tensor]:
    """Return the parts of keys and values that are stored for tokens `begin` to `end`.

    `tensors` are those of `tensors_of`. Window states belong to the last range of a sequence.
    """
    return [
        tensor[:, begin:end] if not windows[i // 2] else tensor if is_last else tensor[:, :0]
        for i, tensor in enumerate(tensors)
    ]


def copy_out(parts: Sequence[Tensor], into: Bytes) -> Bytes:
    """Copy tensors one after another into a buffer; return the part that was filled."""
    done = 0
    for part in parts:
        block = StoredBlock.of(part)
        block.tensor(into[done : done + block.nbytes]).copy_(part)
        done += block.nbytes
    return into[:done]


def add_tokens(
    cache: Any,
    tokens: int,
    last: Sequence[StoredBlock],
    windows: Sequence[int],
    setup: Any,
    device: Any,
) -> list[Tensor]:
    """Make room for stored tokens in an empty KV cache; the caller writes the keys and values.

    last:  the blocks of the last stored range
    setup: the model's ModelSetup

    Returns each layer's keys and values in turn, [heads, tokens, width].
    """
    setup.make_growing(cache)
    tensors: list[Tensor] = []
    for i, (keys, values) in enumerate(zip(last[::2], last[1::2], strict=True)):
        layer = cache.layers[i]
        if isinstance(layer, GrowingLayer):
            empty = [
                torch.empty((1, block.heads, 0, block.width), dtype=block.dtype, device=device)
                for block in (keys, values)
            ]
            tensors += layer.extend(tokens, *empty)
            continue
        pair = [
            torch.empty(
                (1, block.heads, block.tokens if windows[i] else tokens, block.width),
                dtype=block.dtype, device=device,
            ) for block in (keys, values)
        ]  # fmt: skip
        layer.lazy_initialization(*pair)
        layer.keys, layer.values, layer.cumulative_length = *pair, tokens
        tensors += pair
    return [tensor[0] for tensor in tensors]


def copy_in(
    data: Bytes, blocks: Sequence[StoredBlock], into: Sequence[Tensor], windows: Sequence[int],
    begin: int, is_last: bool,
) -> None:  # fmt: skip
    """Copy the stored bytes of a token range to its place in keys and values.

    into:  the tensors that `add_tokens` returned; tokens beyond their end are left out
    begin: the range's first token
    """
    done = 0
    for i, (block, target) in enumerate(zip(blocks, into, strict=True)):
        source = block.tensor(data[done : done + block.nbytes])
        done += block.nbytes
        if not windows[i // 2]:
            place = target[:, begin : begin + block.tokens]
            place.copy_(source[:, : place.shape[1]])
        elif is_last:
            target.copy_(source)
