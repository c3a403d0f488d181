"""KV cache layers with room for further tokens; sliding windows that grow in place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from greenroom.runtime.graphs import outside_graphs

_stamps = itertools.count(1)


def _view(number: int) -> Any:
    """Make the property of a KV cache layer for its keys (0) or its values (1)."""

    def look(layer: InPlaceLayer) -> Tensor | None:
        return layer._current_views()[number]

    def replace(layer: InPlaceLayer, tensor: Tensor | None) -> None:
        views = [*layer._current_views()]
        layer._let_go()
        views[number], layer._views = tensor, views

    return property(look, replace)


class InPlaceLayer:
    """Keys and values of a KV cache layer in tensors with room for further tokens.

    `keys` and `values` are views of these tensors, until other tensors are assigned to them. The
    views are made only when they are read: making them in every decode pass would take as much time
    as computing one more layer.
    """

    _views: list[Tensor | None] | None  # None: not yet made of `_buffers`
    _buffers: tuple[Tensor, Tensor] | None
    _count: int  # tokens in `_buffers`
    _stamp: int  # another one for each pair of `_buffers`; 0: none
    _most: int  # tokens that fit into `_buffers`
    _is_single: bool  # one sequence

    keys, values = _view(0), _view(1)

    def _begin(self) -> None:
        """Begin without tensors; a constructor calls this first."""
        self._views, self._buffers, self._count, self._stamp = [None, None], None, 0, 0

    def _first(self) -> int:
        """Return the row in `_buffers` of the first token of the views."""
        return 0

    def _current_views(self) -> list[Tensor | None]:
        if self._views is None:
            assert self._buffers is not None
            first = self._first()
            self._views = [buffer[:, :, first : self._count] for buffer in self._buffers]
        return self._views

    def _tensors(self) -> tuple[Tensor, Tensor]:
        keys, values = self._current_views()
        assert keys is not None
        assert values is not None
        return keys, values

    def _let_go(self) -> None:
        """Let go of the larger tensors; the caller sets the views."""
        self._buffers, self._stamp = None, 0

    def _take(self, buffers: tuple[Tensor, Tensor], count: int) -> None:
        """Take larger tensors, which have `count` tokens already."""
        self._buffers, self._count, self._views = buffers, count, None
        self._most, self._is_single = min(each.shape[2] for each in buffers), len(buffers[0]) == 1
        self._stamp = next(_stamps)

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceLayer:
        """Copy a KV cache layer with its tokens, without its room for further tokens."""
        views = [tensor if tensor is None else tensor.clone() for tensor in self._current_views()]
        duplicate = copy.copy(self)
        duplicate._let_go()
        duplicate._views = views
        return duplicate


class WindowLayer(InPlaceLayer, DynamicSlidingWindowLayer):
    """KV cache layer of a sliding window, which appends single tokens without a copy.

    transformers' layer copies the window for every token, to other memory. Here a token is written
    behind the ones before it, and tokens that have left the window stay until the tensors are full.
    Then the window moves to new ones. Several tokens at once are appended as by transformers.
    """

    def __init__(self, sliding_window: int, block: int) -> None:
        """Make an empty layer, whose tensors get room for `block` further tokens."""
        self._begin()
        self._block, self._dropped = block, 0  # tokens that are in `_buffers` no more
        super().__init__(sliding_window)

    @classmethod
    def of(cls, layer: DynamicSlidingWindowLayer, block: int) -> WindowLayer:
        """Make a layer that takes over the tokens of transformers' one."""
        window = cls(layer.sliding_window, block)
        for name, value in vars(layer).items():
            setattr(window, name, value)
        return window

    @property
    def cumulative_length(self) -> int:
        """Return the number of all tokens so far, inside and outside of the window."""
        return self._dropped + self._count

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        self._dropped = tokens - self._count

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop`, as transformers does."""
        self.keys = self.keys  # from here on in tensors of transformers' own
        super().activate_past_recording()

    def _first(self) -> int:
        return max(0, self._count - self.sliding_window + 1)

    def _let_go(self) -> None:
        super()._let_go()
        self._dropped, self._count = self._dropped + self._count, 0

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, new tokens, width]; return those to attend to."""
        appends = key_states.dim() == 4 and key_states.shape[0] == key_states.shape[2] == 1
        if not appends or not self.cumulative_length or self.record_past:
            return super().update(key_states, value_states, *args, **kwargs)
        if key_states.requires_grad or self._tensors()[0].shape[0] != 1:
            return super().update(key_states, value_states, *args, **kwargs)
        if self._buffers is None or self._count == self._most:
            self._move(self._tensors())
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._count : self._count + 1] = new
        self._count, self._views = self._count + 1, None
        first = max(0, self._count - self.sliding_window)
        keys, values = (buffer[:, :, first : self._count] for buffer in self._buffers)
        return keys, values

    def _move(self, window: Sequence[Tensor]) -> None:
        """Move the window to new tensors, with room for further tokens."""
        tokens, have = self.cumulative_length, window[0].shape[2]
        room = have + self._block
        with torch.inference_mode(False):  # else they could not be written outside of it
            keys, values = (x.new_empty((*x.shape[:2], room, x.shape[3])) for x in window)
        for old, new in zip(window, (keys, values), strict=True):
            new[:, :, :have] = old
        self._take((keys, values), have)
        self.cumulative_length = tokens
