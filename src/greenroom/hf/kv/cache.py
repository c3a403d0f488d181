"""KV cache layers that grow in place, and functions on KV caches of any kind.

transformers' `DynamicCache` copies all keys and values for every token: with a context of 190
tokens, this takes 0.2 ms for each layer, and more as the context grows; and it fragments memory.
Here, a layer's keys and values are views of larger tensors. In host memory, the larger tensors are
reserved address space, whose pages take memory only once they are written. Nothing is copied until
the reserved space (by default 4096 tokens) is full. On a GPU, the larger tensors grow by blocks of
256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from greenroom.hf.kv.in_place import InPlaceLayer, WindowLayer
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import KeyValueView
from greenroom.runtime.memory.system import reserve_memory

ROOM = 4096  # tokens of address space by default
BLOCK = 256  # tokens that a GPU's tensors grow by
FREED = 64 << 20  # bytes of outgrown tensors that a GPU's allocator may keep


class GrowingLayer(InPlaceLayer, DynamicLayer):
    """KV cache layer, a `DynamicLayer` of transformers, that appends tokens without a copy."""

    format_number = 0  # of a `KeyValueFormat`, in layers that quantise

    def __init__(self, room: int, in_blocks: bool) -> None:
        """Make an empty KV cache layer that grows in place.

        room:      tokens that address space is reserved for, in host memory
        in_blocks: whether memory grows by blocks of 256 tokens instead, as on a GPU
        """
        self._begin()
        self._room, self._in_blocks = room, in_blocks
        super().__init__()

    @classmethod
    def of(cls, layer: DynamicLayer, room: int = ROOM, in_blocks: bool = False) -> GrowingLayer:
        """Make a growing KV cache layer that takes over the tokens of a plain one."""
        growing = cls(room, in_blocks)
        for name, value in vars(layer).items():
            setattr(growing, name, value)
        return growing

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._buffers is None else self._count

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, new tokens, width] to a KV cache layer.

        Returns the keys and values of all tokens.
        """
        # Beam search replaces the tensors for every token, so room would be wasted.
        moved = self._buffers is None and self.get_seq_length() and len(key_states) > 1
        if moved or key_states.requires_grad or key_states.dim() != 4:
            return super().update(key_states, value_states, *args, **kwargs)
        new = key_states.shape[2]
        keys, values = self.extend(new, key_states, value_states)
        keys[:, :, -new:], values[:, :, -new:] = key_states, value_states
        return keys, values

    def extend(self, tokens: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Add room for tokens to a KV cache layer; the caller writes their keys and values.

        `like` are keys and values, [batch, heads, any number, width], of the type that the layer
        stores. Returns the keys and values of all tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(*like)
        self._add(tokens, *like)
        return self._tensors()

    def append_token(self) -> KeyValueView | None:
        """Add room for one token to a KV cache layer.

        A kernel writes the token's keys and values later. Returns the layer's tensors and its new
        number of tokens. If the layer has several sequences, it is not changed, and the result is
        None.
        """
        if self._buffers is None or self._count == self._most or not self._is_single:
            keys, values = self._buffers or self._tensors()
            if keys.shape[0] != 1:
                return None
            self._make(self.get_seq_length() + 1, (keys, values))
            assert self._buffers is not None
        self._count, self._views = self._count + 1, None
        return KeyValueView(*self._buffers, self._count, self.format_number)

    def _add(self, tokens: int, *like: Tensor) -> None:
        """Add room for tokens, which are not written yet, to a KV cache layer."""
        if self._buffers is None or self._count + tokens > self._most:
            self._make(self.get_seq_length() + tokens, like)
        self._count += tokens
        self._views = None

    def _make(self, tokens: int, like: Sequence[Tensor]) -> None:
        """Move a KV cache layer to new tensors with room for `tokens` tokens."""
        have, before = self.get_seq_length(), self._current_views()
        keys, values = (self._fresh(each, tokens) for each in like)
        for old, new in zip(before, (keys, values), strict=True):
            if have and old is not None:
                new[:, :, :have] = old
        self._take((keys, values), have)

    def _fresh(self, like: Tensor, tokens: int) -> Tensor:
        """Return a new tensor of the same kind, with room for at least `tokens` tokens."""
        batch, heads, _, width = like.shape
        with torch.inference_mode(False):  # else it could not be written outside of inference mode
            if self._in_blocks:
                room = -(-tokens // BLOCK) * BLOCK
                return like.new_empty((batch, heads, room, width))
            row = width * like.element_size()
            each = PAGESIZE // gcd(PAGESIZE, row)  # tokens, so that a head begins on a page
            room = tokens if tokens <= self._room else 2 * tokens
            room = -(-max(room, self._room) // each) * each
            space = reserve_memory(batch * heads * room * row)
            return torch.frombuffer(space, dtype=like.dtype).view(batch, heads, room, width)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of a KV cache layer; the others are not copied.

        `tokens_to_remove` is a negative number, as in transformers; 0 changes nothing.
        """
        if self._buffers is None or tokens_to_remove >= 0:
            super().crop(tokens_to_remove)
        else:
            self._count, self._views = max(0, self._count + tokens_to_remove), None

    def grow(self, tokens: int) -> int:
        """Make room for `tokens` tokens in total in a KV cache layer.

        Returns the bytes of the smaller tensors that were replaced; 0 if there was room.
        """
        if not self.get_seq_length() or (self._buffers is not None and tokens <= self._most):
            return 0
        before = self.nbytes
        self._make(tokens, self._tensors())
        return before

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that a KV cache layer takes now.

        Reserved pages that were never written take none.
        """
        if not self.is_initialized:
            return 0
        if self._buffers is None or self._in_blocks:
            return sum(tensor.nbytes for tensor in self._buffers or self._tensors())
        pages = 0
        for batch, heads, _, width in (buffer.shape for buffer in self._buffers):
            row = self._count * width * self._buffers[0].element_size()
            pages += batch * heads * -(-row // PAGESIZE)
        return pages * PAGESIZE


def caches_of(cache: Any) -> tuple[Any, ...]:
    """Return the caches that a KV cache consists of.

    An encoder-decoder model has two, of self-attention and of cross-attention. Other models have
    one. The result is empty for None.
    """
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return () if cache is None else (cache,)


def layers_of(cache: Any) -> Iterator[Any]:
    """Iterate over the layers of a KV cache of any kind."""
    for part in caches_of(cache):
        yield from part.layers


def make_growing(
    cache: Any,
    room: int = ROOM,
    in_blocks: bool = False,
    replace: Callable[[DynamicLayer, int, bool], GrowingLayer] | None = None,
) -> None:
    """Make all plain layers of a KV cache grow in place, also later ones.

    room:      tokens for which address space is reserved, in host memory
    in_blocks: whether memory grows by blocks of 256 tokens instead, as on a GPU
    replace:   makes a growing layer with the tokens of a plain one; None: `GrowingLayer.of`
    On a GPU, those of sliding windows append single tokens in place. Other kinds do not change.
    """
    replace = replace or GrowingLayer.of
    for part in caches_of(cache):
        if type(part) is not DynamicCache or part.offloading:
            continue
        if part.layer_class_to_replicate is DynamicLayer:
            part.layer_class_to_replicate = partial(_grown, replace, room, in_blocks)
        for index, layer in enumerate(part.layers):
            if type(layer) is DynamicLayer:
                part.layers[index] = replace(layer, room, in_blocks)
            elif type(layer) is DynamicSlidingWindowLayer and in_blocks:
                part.layers[index] = WindowLayer.of(layer, BLOCK)


def _grown(
    replace: Callable[[DynamicLayer, int, bool], GrowingLayer], room: int, in_blocks: bool
) -> GrowingLayer:
    return replace(DynamicLayer(), room, in_blocks)


def make_room(cache: Any, tokens: int, release: Callable[[], None]) -> None:
    """Make room for `tokens` tokens in total in a GPU's KV cache, layer by layer.

    `release` returns the allocator's unused memory to the GPU. It is called after every 64 MiB of
    replaced tensors; otherwise the allocator would keep all of them until the last layer has grown.
    """
    freed = 0
    for layer in layers_of(cache):
        if isinstance(layer, GrowingLayer):
            freed += layer.grow(tokens)
        if freed > FREED:
            release()
            freed = 0
    if freed:
        release()


def has_all_tokens(cache: Any, tokens: int) -> bool:
    """Return whether a KV cache has keys and values of its first `tokens` tokens.

    The result is False for recurrent states, offloaded caches, and sliding windows that have
    dropped tokens.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(
        _has_all_tokens(layer) and layer.get_seq_length() >= tokens for layer in cache.layers
    )


def _has_all_tokens(layer: Any) -> bool:
    if type(layer) in (DynamicSlidingWindowLayer, WindowLayer):
        return bool(layer.cumulative_length < layer.sliding_window)
    return type(layer) is DynamicLayer or isinstance(layer, GrowingLayer)


def truncate(cache: Any, tokens: int) -> bool:
    """Truncate a KV cache in place to its first `tokens` tokens; return False if impossible.

    The layers may have different numbers of tokens, as after a forward pass that failed.
    """
    if cache is None or type(cache) is not DynamicCache or cache.offloading:
        return cache is None and tokens == 0
    for layer in cache.layers:
        excess = layer.get_seq_length() - tokens if isinstance(layer, DynamicLayer) else 1
        if excess > 0 and not _has_all_tokens(layer):
            return False
    for layer in cache.layers:
        if (excess := layer.get_seq_length() - tokens) > 0:
            layer.crop(-excess)
    return True


def copy_tokens(cache: Any, tokens: int, into: Any) -> Any:
    """Copy the first `tokens` tokens of a KV cache to the empty cache `into`.

    Returns `into`, whose layers are of the same kinds. `has_all_tokens(cache, tokens)` must be
    true.
    """
    for index, layer in enumerate(cache.layers):
        parts = [stored[:, :, :tokens] for stored in (layer.keys, layer.values)]
        target = into.layers[index] if index < len(into.layers) else None
        if not isinstance(target, GrowingLayer):
            into.update(*parts, index)
            continue
        for room, part in zip(target.extend(tokens, *parts), parts, strict=True):
            room.copy_(part)
    return into


def held_bytes(cache: Any) -> int:
    """Return the bytes of memory that a KV cache of any kind takes now."""
    return sum(
        layer.nbytes if isinstance(layer, GrowingLayer) else tensor_bytes(vars(layer))
        for layer in layers_of(cache)
    )


def tensor_bytes(values: Any) -> int:
    """Return the total size in bytes of tensors in nested lists and dicts.

    Storages that tensors share count once.
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in a nested value; optimum-quanto's tensors contain others."""
    for value in tree_leaves(values):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _tensors([getattr(value, name) for name in names])
        elif isinstance(value, Tensor):
            yield value
