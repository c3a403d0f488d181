"""Keys and values that grow in place, and what a KV cache holds.

transformers' `DynamicCache` makes new tensors of all keys and values for every token: with 190
tokens of context 0.2 ms a layer, and more as the context grows; and their memory comes back in
pieces that fit nothing else. Here a layer's tensors are views of larger ones. In host memory those
are address space: a page is there once it is written, and all are gone with the last view, so that
nothing is ever copied within `room` tokens. On a GPU they grow by a BLOCK of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import Room
from greenroom.runtime.memory.system import reservation

ROOM = 4096  # tokens of address space, where nothing else is said
BLOCK = 256  # tokens that a GPU's tensors grow by
FREED = 64 << 20  # bytes that a GPU's allocator may keep of tensors that were outgrown


class _Room:
    """A tensor [batch, heads, tokens, width] with room behind its tokens."""

    def __init__(self, room: int, in_blocks: bool) -> None:
        """`room` tokens of address space, or as many blocks of memory as it takes."""
        self._room, self._in_blocks = room, in_blocks
        self._view: Tensor | None = None
        self._whole: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory that is taken; a page is, once it has been written."""
        if self._whole is None or self._view is None:
            return 0
        if self._in_blocks:
            return self._whole.nbytes
        batch, heads, tokens, width = self._view.shape
        row = tokens * width * self._view.element_size()
        return batch * heads * -(-row // PAGESIZE) * PAGESIZE

    def cut(self, tensor: Tensor, tokens: int) -> Tensor:
        """`tensor` with its first tokens alone, in place."""
        return self.first(tokens) if self.holds(tensor) else tensor[:, :, :tokens]

    def first(self, tokens: int) -> Tensor:
        """So many tokens of what there is room for."""
        assert self._whole is not None
        self._view = self._whole[:, :, :tokens]
        return self._view

    def whole(self, tokens: int) -> Tensor | None:
        """All that there is room for, where that is so many tokens."""
        whole = self._whole
        return None if whole is None or tokens > whole.shape[2] else whole

    def holds(self, tensor: Tensor) -> bool:
        """Is this the tensor that was given out last? Others (a copy, a part) are not built on."""
        return tensor is self._view and self._whole is not None

    def grown(self, tensor: Tensor, like: Tensor, by: int) -> Tensor:
        """`tensor` (or nothing yet) with `by` more tokens, which are not set."""
        tokens = tensor.shape[2] if tensor.dim() == 4 else 0
        self.make(tensor, like, tokens + by)
        return self.first(tokens + by)

    def make(self, tensor: Tensor, like: Tensor, tokens: int) -> Tensor:
        """Room for so many tokens; what `tensor` has of them, in its new place."""
        have = tensor.shape[2] if tensor.dim() == 4 else 0
        if not self.holds(tensor) or self.whole(tokens) is None:
            batch, heads, _, width = like.shape
            fresh = self._fresh((batch, heads, tokens, width), like)
            if have:
                fresh[:, :, :have] = tensor
            self._whole, self._view = fresh, fresh[:, :, :have]
        assert self._view is not None
        return self._view

    def _fresh(self, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        """A tensor with room for `shape`'s tokens, and more."""
        batch, heads, tokens, width = shape
        with torch.inference_mode(False):  # else nobody outside could write to it
            if self._in_blocks:
                room = -(-tokens // BLOCK) * BLOCK
                whole = like.new_empty((batch, heads, room, width))
            else:
                row = width * like.element_size()
                each = PAGESIZE // gcd(PAGESIZE, row)  # tokens, so that a head begins on a page
                room = tokens if tokens <= self._room else 2 * tokens
                room = -(-max(room, self._room) // each) * each
                whole = torch.frombuffer(
                    reservation(batch * heads * room * row), dtype=like.dtype
                ).view(batch, heads, room, width)
        return whole


class Growing(DynamicLayer):
    """A `DynamicLayer` with room for the tokens to come.

    A token that `one_more` adds is not seen in keys and values before somebody looks at them: two
    views of every layer take a compiled pass as long as a layer.
    """

    def __init__(self, room: int = ROOM, in_blocks: bool = False) -> None:
        self._options = room, in_blocks
        self._rooms = _Room(*self._options), _Room(*self._options)
        self._count = 0  # tokens in the rooms, as long as none were added but by `one_more`
        self._unseen = False
        super().__init__()

    @classmethod
    def of(cls, layer: DynamicLayer, room: int = ROOM, in_blocks: bool = False) -> Growing:
        """A layer that goes on where a plain one is."""
        made = cls(room, in_blocks)
        for name, value in vars(layer).items():
            setattr(made, name, value)
        return made

    @property
    def keys(self) -> Tensor | None:
        self._look()
        return self._keys

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._look()
        self._keys, self._count = tensor, 0

    @property
    def values(self) -> Tensor | None:
        self._look()
        return self._values

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._look()
        self._values, self._count = tensor, 0

    def _look(self) -> None:
        if self._unseen:
            self._unseen = False
            self._keys, self._values = (room.first(self._count) for room in self._rooms)

    def get_seq_length(self) -> int:
        return self._count or super().get_seq_length()

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, tokens, width] with those that are given now."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._tensors()
        # A search with beams makes new tensors for every token: they are not worth a room.
        moved = keys.dim() == 4 and keys.shape[0] > 1 and not self._rooms[0].holds(keys)
        if moved or key_states.requires_grad or key_states.dim() != 4:
            return super().update(key_states, value_states, *args, **kwargs)
        new = key_states.shape[2]
        keys = self.keys = self._rooms[0].grown(keys, key_states, new)
        values = self.values = self._rooms[1].grown(values, value_states, new)
        keys[:, :, -new:], values[:, :, -new:] = key_states, value_states
        return keys, values

    def one_more(self) -> Room | None:
        """Add a token, unset; None, and nothing done, where there are several requests."""
        if not self._count or self._rooms[0].whole(self._count + 1) is None:
            both = self._tensors()
            if both[0].shape[0] != 1:
                return None
            self.keys, self.values = grown = [
                room.grown(tensor, tensor, 1)
                for room, tensor in zip(self._rooms, both, strict=True)
            ]
            self._count = grown[0].shape[2]
        else:
            self._count += 1
            self._unseen = True
        whole = [room.whole(self._count) for room in self._rooms]
        assert whole[0] is not None
        assert whole[1] is not None
        return Room(whole[0], whole[1], self._count)

    def crop(self, tokens_to_remove: int) -> None:
        """Without the last -`tokens_to_remove` tokens; those that remain are not moved."""
        if tokens_to_remove > 0:
            raise ValueError("tokens to remove are told as a negative number")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        keys, values = self._tensors()
        left = max(0, keys.shape[2] + tokens_to_remove)
        self.keys, self.values = self._rooms[0].cut(keys, left), self._rooms[1].cut(values, left)

    def make(self, tokens: int) -> int:
        """Room for so many tokens; the bytes that were left behind for it."""
        if not self.is_initialized or self._tensors()[0].dim() != 4:
            return 0
        before = self.nbytes
        keys, values = self._tensors()
        self.keys = self._rooms[0].make(keys, keys, tokens)
        self.values = self._rooms[1].make(values, values, tokens)
        return before if self.keys is not keys else 0

    def _tensors(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Memory that keys and values take."""
        if not self.is_initialized:
            return 0
        return sum(
            room.nbytes if room.holds(tensor) else tensor.nbytes
            for room, tensor in zip(self._rooms, self._tensors(), strict=True)
        )

    def reset(self) -> None:
        super().reset()
        self._count = 0
        self._rooms = _Room(*self._options), _Room(*self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        """Its tokens without the room behind them."""
        self._look()
        made = Growing(*self._options)
        made.__dict__ |= {
            name: copy.deepcopy(value, memo) if not isinstance(value, Tensor) else value.clone()
            for name, value in vars(self).items()
            if name not in ("_rooms", "_count")
        }
        return made


def caches_of(cache: Any) -> tuple[Any, ...]:
    """The caches of decoder layers that a cache is made of."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return () if cache is None else (cache,)


def adopt(cache: Any, room: int = ROOM, in_blocks: bool = False) -> None:
    """Let the plain layers of a cache grow in place, also those that it has yet to make."""
    for part in caches_of(cache):
        if type(part) is not DynamicCache or part.offloading:
            continue
        if part.layer_class_to_replicate is DynamicLayer:
            part.layer_class_to_replicate = partial(Growing, room, in_blocks)
        for index, layer in enumerate(part.layers):
            if type(layer) is DynamicLayer:
                part.layers[index] = Growing.of(layer, room, in_blocks)


def reserve(cache: Any, layer_idx: int) -> Room | None:
    """Add a token to a layer, unset.

    None where the cache is of another kind, empty, or holds several requests.
    """
    if type(cache) is not DynamicCache or cache.offloading or layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer:
        layer = cache.layers[layer_idx] = Growing.of(layer)
    if type(layer) is not Growing or not layer.is_initialized:
        return None
    return layer.one_more()


def take_back(cache: Any, layer_idx: int) -> None:
    """Take the token out again that `reserve` added to a layer."""
    cache.layers[layer_idx].crop(-1)


def make_room(cache: Any, tokens: int, release: Callable[[], None]) -> None:
    """On a GPU: room for so many tokens, layer by layer. What was outgrown goes back as it adds
    up, by `release`; else the allocator would keep all of it until the last layer has grown."""
    freed = 0
    for part in caches_of(cache):
        for layer in part.layers:
            if type(layer) is Growing:
                freed += layer.make(tokens)
            if freed > FREED:
                release()
                freed = 0
    if freed:
        release()


def whole(cache: Any, tokens: int) -> bool:
    """Are the keys and values of a sequence's first tokens all there, each by itself?

    A recurrence keeps none of them, a sliding window forgets, a quantised cache joins several.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(_whole(layer) and layer.get_seq_length() >= tokens for layer in cache.layers)


def _whole(layer: Any) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.cumulative_length < layer.sliding_window)
    return type(layer) in (DynamicLayer, Growing)


def cut(cache: Any, tokens: int) -> bool:
    """Forget what is after a sequence's first tokens, in place; False where that cannot be done.

    Layers may have different numbers of them, as after a pass that failed.
    """
    if cache is None or type(cache) is not DynamicCache or cache.offloading:
        return cache is None and tokens == 0
    for layer in cache.layers:
        more = layer.get_seq_length() - tokens if isinstance(layer, DynamicLayer) else 1
        if more > 0 and not _whole(layer):
            return False
    for layer in cache.layers:
        if (more := layer.get_seq_length() - tokens) > 0:
            layer.crop(-more)
    return True


def copied(cache: Any, tokens: int, into: Any) -> Any:
    """`into`, an empty cache, with keys and values of a `whole` sequence's first tokens."""
    for index, layer in enumerate(cache.layers):
        into.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return into


def held(cache: Any) -> int:
    """Bytes that a cache of any kind holds now."""
    total = 0
    for part in caches_of(cache):
        for layer in part.layers:
            grows = isinstance(layer, Growing)
            total += layer.nbytes if grows else held_by(list(vars(layer).values()))
    return total


def held_by(values: Any) -> int:
    """Bytes behind the tensors in lists, dicts and tensors that are made of others."""
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in it; optimum-quanto's are made of others."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _tensors([getattr(value, name) for name in names])
        else:
            yield value
