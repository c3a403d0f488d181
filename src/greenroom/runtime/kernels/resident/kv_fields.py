"""Fields of kernel calls that describe a token's keys and values in all layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from weakref import ref

import numpy as np
import torch

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.dense.attention import KeyValueView

MOST = 64  # KV caches that are known at a time


class KeyValueFields:
    """The values of these fields for the tokens of one KV cache.

    They are in the order of `FusedDecoderLayer.key_value_fields`.
    """

    COUNT = 13

    def __init__(self, views: Sequence[KeyValueView]) -> None:
        """Describe a KV cache by its keys and values in each layer."""
        # Weak references: a finished request's cache must not be kept in memory.
        self._tensors = [ref(each) for view in views for each in view[:2]]
        rows = [
            [*_strides(view.keys), *_strides(view.values), view.format] for view in views
        ]  # address, bytes from head to head, bytes from token to token
        k, k_head, k_row, v, v_head, v_row, form = np.array(rows, np.int64).T
        none = np.zeros_like(k)
        fixed = (k - k_row, v - v_row, k_head, v_head, form, none, k, k_head, k_row, v, v_head)
        self._fixed = np.stack([*fixed, v_row, form], -1)
        self._per_token = np.stack([k_row, v_row, none, none, none, none + 1, *[none] * 7], -1)

    def is_for(self, views: Sequence[KeyValueView]) -> bool:
        """Check that these are the tensors of the same KV cache."""
        tensors = [each for view in views for each in view[:2]]
        return all(map(is_, [find() for find in self._tensors], tensors))

    def values(self, views: Sequence[KeyValueView]) -> Ints:
        """Return the values of the fields [layers, fields] for the last token of each view."""
        tokens = np.array([view.tokens for view in views], np.int64)
        values: Ints = self._fixed + self._per_token * tokens[:, None]
        return values


class KnownCaches:
    """The fields of KV caches that were seen before."""

    def __init__(self) -> None:
        self._caches: dict[int, KeyValueFields] = {}  # by the address of the first layer's keys

    def fields(self, views: Sequence[KeyValueView]) -> Ints:
        """Return the values of a token's fields [layers, fields]; `views` has all layers."""
        address = views[0].keys.data_ptr()
        cache = self._caches.get(address)
        if cache is None or not cache.is_for(views):
            if len(self._caches) >= MOST:
                self._caches.clear()
            cache = self._caches[address] = KeyValueFields(views)
        return cache.values(views)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return (address, bytes from head to head, bytes from token to token)."""
    _, head, row, _ = tensor.stride()
    return tensor.data_ptr(), tensor.itemsize * head, tensor.itemsize * row
