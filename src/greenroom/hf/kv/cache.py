"""Keys and values that grow in place, and what a KV cache holds.

transformers' `DynamicCache` makes new tensors of all keys and values for every token: with 190
tokens of context 0.2 ms a layer, and more as the context grows; and their memory comes back in
pieces that fit nothing else. Here a layer's tensors are views of larger ones. In host memory those
are address space: a page is there once it is written, and all are gone with the last view, so that
nothing is ever copied within `room` tokens. On a GPU they grow by a BLOCK of tokens.
"""

from __future__ import annotations

import copy
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

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import KeyValueView
from greenroom.runtime.memory.system import reserve_memory

ROOM = 4096  # tokens of address space, where nothing else is said
BLOCK = 256  # tokens that a GPU's tensors grow by
FREED = 64 << 20  # bytes that a GPU's allocator may keep of tensors that were outgrown


def _view(number: int) -> Any:
    """Keys or values, as a layer has them."""

    def look(layer: GrowingLayer) -> Tensor | None:
        return layer._look()[number]

    def replace(layer: GrowingLayer, tensor: Tensor | None) -> None:
        layer._views, layer._wholes = [*layer._look()], None
        layer._views[number] = tensor

    return property(look, replace)


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` with room for the tokens to come.

    Keys and values are views of tensors with room behind their tokens, until others take their
    place: a copy, or a part of them. The views are made when somebody looks at them: two views of
    every layer take a compiled pass as long as a layer.
    """

    def __init__(self, room: int, in_blocks: bool) -> None:
        """`room` tokens of address space, or as many blocks of memory as it takes."""
        self._room, self._in_blocks = room, in_blocks
        self._views: list[Tensor | None] | None = [None, None]  # None: of `_wholes`, not made yet
        self._wholes: tuple[Tensor, Tensor] | None = None
        self._count = 0  # tokens in these
        super().__init__()

    @classmethod
    def of(cls, layer: DynamicLayer, room: int = ROOM, in_blocks: bool = False) -> GrowingLayer:
        """A layer that goes on where a plain one is."""
        made = cls(room, in_blocks)
        for name, value in vars(layer).items():
            setattr(made, name, value)
        return made

    keys, values = _view(0), _view(1)

    def _look(self) -> list[Tensor | None]:
        if self._views is None:
            assert self._wholes is not None
            self._views = [has_all_tokens[:, :, : self._count] for has_all_tokens in self._wholes]
        return self._views

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._wholes is None else self._count

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, tokens, width] with those that are given now."""
        # A search with beams makes new tensors for every token: they are not worth a room.
        moved = self._wholes is None and self.get_seq_length() and len(key_states) > 1
        if moved or key_states.requires_grad or key_states.dim() != 4:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        self._add(new, key_states, value_states)
        keys, values = self._tensors()
        keys[:, :, -new:], values[:, :, -new:] = key_states, value_states
        return keys, values

    def append_token(self) -> KeyValueView | None:
        """Add a token, unset; None, and nothing done, where there are several requests."""
        keys, values = self._wholes or self._tensors()
        if keys.shape[0] != 1:
            return None
        self._add(1, keys, values)
        assert self._wholes is not None
        return KeyValueView(*self._wholes, self._count)

    def _add(self, tokens: int, *like: Tensor) -> None:
        """More tokens, which are not set."""
        if self._wholes is None or self._count + tokens > self._most:
            self._make(self.get_seq_length() + tokens, like)
        self._count += tokens
        self._views = None

    def _make(self, tokens: int, like: Sequence[Tensor]) -> None:
        """New tensors with room for so many tokens; keys and values move there."""
        have, before = self.get_seq_length(), self._look()
        keys, values = (self._fresh(each, tokens) for each in like)
        for old, new in zip(before, (keys, values), strict=True):
            if have and old is not None:
                new[:, :, :have] = old
        self._wholes, self._count, self._views = (keys, values), have, None
        self._most = min(keys.shape[2], values.shape[2])

    def _fresh(self, like: Tensor, tokens: int) -> Tensor:
        """A tensor with room for so many tokens, and more."""
        batch, heads, _, width = like.shape
        with torch.inference_mode(False):  # else nobody outside could write to it
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
        """Without the last -`tokens_to_remove` tokens; those that remain are not moved."""
        if self._wholes is None or tokens_to_remove >= 0:
            super().crop(tokens_to_remove)
        else:
            self._count, self._views = max(0, self._count + tokens_to_remove), None

    def grow(self, tokens: int) -> int:
        """Room for so many tokens; the bytes that were left behind for it."""
        if not self.get_seq_length() or (self._wholes is not None and tokens <= self._most):
            return 0
        before = self.nbytes
        self._make(tokens, self._tensors())
        return before

    def _tensors(self) -> tuple[Tensor, Tensor]:
        keys, values = self._look()
        assert keys is not None
        assert values is not None
        return keys, values

    @property
    def nbytes(self) -> int:
        """Memory that keys and values take; a page is taken once it has been written."""
        if not self.is_initialized:
            return 0
        if self._wholes is None or self._in_blocks:
            return sum(tensor.nbytes for tensor in self._wholes or self._tensors())
        pages = 0
        for batch, heads, _, width in (has_all_tokens.shape for has_all_tokens in self._wholes):
            row = self._count * width * self._wholes[0].element_size()
            pages += batch * heads * -(-row // PAGESIZE)
        return pages * PAGESIZE

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingLayer:
        """Its tokens without the room behind them."""
        made = copy.copy(self)
        made._views = [tensor if tensor is None else tensor.clone() for tensor in self._look()]
        made._wholes = None
        return made


def caches_of(cache: Any) -> tuple[Any, ...]:
    """The caches of decoder layers that a cache is made of."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return () if cache is None else (cache,)


def layers_of(cache: Any) -> Iterator[Any]:
    """The layers of a cache of any kind."""
    for part in caches_of(cache):
        yield from part.layers


def make_growing(cache: Any, room: int = ROOM, in_blocks: bool = False) -> None:
    """Let the plain layers of a cache grow in place, also those that it has yet to make."""
    for part in caches_of(cache):
        if type(part) is not DynamicCache or part.offloading:
            continue
        if part.layer_class_to_replicate is DynamicLayer:
            part.layer_class_to_replicate = partial(GrowingLayer, room, in_blocks)
        for index, layer in enumerate(part.layers):
            if type(layer) is DynamicLayer:
                part.layers[index] = GrowingLayer.of(layer, room, in_blocks)


def append_token(cache: Any, layer_idx: int) -> KeyValueView | None:
    """Add a token to a layer, unset.

    None where the cache is of another kind, empty, or holds several requests.
    """
    if type(cache) is not DynamicCache or cache.offloading or layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer:
        layer = cache.layers[layer_idx] = GrowingLayer.of(layer)
    if type(layer) is not GrowingLayer or not layer.is_initialized:
        return None
    return layer.append_token()


def remove_token(cache: Any, layer_idx: int) -> None:
    """Take the token out again that `append_token` added to a layer."""
    cache.layers[layer_idx].crop(-1)


def make_room(cache: Any, tokens: int, release: Callable[[], None]) -> None:
    """On a GPU: room for so many tokens, layer by layer. What was outgrown goes back as it adds
    up, by `release`; else the allocator would keep all of it until the last layer has grown."""
    freed = 0
    for layer in layers_of(cache):
        if type(layer) is GrowingLayer:
            freed += layer.grow(tokens)
        if freed > FREED:
            release()
            freed = 0
    if freed:
        release()


def has_all_tokens(cache: Any, tokens: int) -> bool:
    """Are the keys and values of a sequence's first tokens all there, each by itself?

    A recurrence keeps none of them, a sliding window forgets, a quantised cache joins several.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(
        _has_all_tokens(layer) and layer.get_seq_length() >= tokens for layer in cache.layers
    )


def _has_all_tokens(layer: Any) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.cumulative_length < layer.sliding_window)
    return type(layer) in (DynamicLayer, GrowingLayer)


def truncate(cache: Any, tokens: int) -> bool:
    """Forget what is after a sequence's first tokens, in place; False where that cannot be done.

    Layers may have different numbers of them, as after a pass that failed.
    """
    if cache is None or type(cache) is not DynamicCache or cache.offloading:
        return cache is None and tokens == 0
    for layer in cache.layers:
        more = layer.get_seq_length() - tokens if isinstance(layer, DynamicLayer) else 1
        if more > 0 and not _has_all_tokens(layer):
            return False
    for layer in cache.layers:
        if (more := layer.get_seq_length() - tokens) > 0:
            layer.crop(-more)
    return True


def copy_tokens(cache: Any, tokens: int, into: Any) -> Any:
    """Copy a sequence's first tokens to the empty cache `into`; `has_all_tokens` must hold."""
    for index, layer in enumerate(cache.layers):
        into.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return into


def held_bytes(cache: Any) -> int:
    """Bytes that a cache of any kind holds now."""
    return sum(
        layer.nbytes if isinstance(layer, GrowingLayer) else tensor_bytes(vars(layer))
        for layer in layers_of(cache)
    )


def tensor_bytes(values: Any) -> int:
    """Bytes behind the tensors in lists, dicts and tensors that are made of others."""
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    """The plain tensors in it; optimum-quanto's are made of others."""
    for value in tree_leaves(values):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _tensors([getattr(value, name) for name in names])
        elif isinstance(value, Tensor):
            yield value
