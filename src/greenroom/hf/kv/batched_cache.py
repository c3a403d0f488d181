"""KV caches of several sequences, as one KV cache of a batched forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class BatchedCache(Cache):
    """KV caches of several sequences that share one forward pass.

    caches, lengths: the KV cache and the number of new tokens of each sequence; a cache that occurs
            again stands for the next tokens of the same sequence
    starts: the number of tokens before the new ones, for each of `caches`
    exact:  whether every token must have the same bits as in a pass of one sequence
    joined: whether `update` returns the keys and values of all sequences in one tensor, for layers
            that compute keys and values from latent vectors (multi-head latent attention)
    layer_states: keys and values of each sequence in the layer that was updated last
    """

    def __init__(
        self,
        caches: Sequence[Any],
        lengths: Sequence[int],
        *,
        exact: bool,
        joined: bool,
    ) -> None:
        super().__init__(layers=[])
        self.caches, self.lengths = list(caches), list(lengths)
        self.exact, self._joined = exact, joined
        self.starts: list[int] = []
        self._tokens: dict[int, int] = {}  # with this pass, by the id of a cache
        for cache, new in zip(caches, lengths, strict=True):
            before = self._tokens.get(id(cache), length_of(cache))
            self.starts.append(before)
            self._tokens[id(cache)] = before + new
        # Compiled layers need one new token in each sequence, and tokens before it.
        self.one_token_each = max(lengths) == 1 and all(self.starts)
        self.layer_states: list[tuple[Tensor, Tensor]] = []
        self._embeddings: Any = None  # the argument of the last `positions`, the same in all layers
        self._positions: list[tuple[Tensor, Tensor]] = []

    def additions(self) -> tuple[list[Any], list[int]]:
        """Return each KV cache once, and how many tokens the pass adds to it."""
        distinct = list({id(cache): cache for cache in self.caches}.values())
        return distinct, [self._tokens[id(cache)] - length_of(cache) for cache in distinct]

    def positions(self, embeddings: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Split rotary embeddings by token: return a pair (cosines, sines) for each token.

        `embeddings` are the cosines and sines of a pass, [1, tokens, width] each.
        """
        if self._embeddings is not embeddings:
            cos, sin = (each.split(1, 1) for each in embeddings)
            self._embeddings, self._positions = embeddings, list(zip(cos, sin, strict=True))
        return self._positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values [1, heads, tokens, width] to their sequences' KV caches.

        Returns the two arguments unchanged, since the batched attention reads `layer_states`. With
        `joined`, returns all keys and values, [1, heads, tokens of all sequences, width].
        """
        parts = zip(
            self.caches,
            key_states.split(self.lengths, 2),
            value_states.split(self.lengths, 2),
            strict=True,
        )
        self.layer_states = [
            cache.update(k, v, layer_idx, *args, **kwargs) for cache, k, v in parts
        ]
        if self._joined:
            keys, values = zip(*self.layer_states, strict=True)
            return torch.cat(keys, 2), torch.cat(values, 2)
        return key_states, value_states

    def split_states(self, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each sequence's keys and values in a layer, of old and new tokens.

        `key` and `value` are the arguments of the layer's attention function.
        """
        if not self._joined:
            return self.layer_states
        tokens = [k.shape[2] for k, _ in self.layer_states]
        return list(zip(key.split(tokens, 2), value.split(tokens, 2), strict=True))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of the longest sequence in a batched pass.

        transformers asks for it; no result depends on it, since the pass has explicit positions.
        """
        return max(length_of(cache) for cache in self.caches)


def length_of(cache: Any) -> int:
    """Return the number of tokens in a sequence's KV cache; 0 if the cache is None."""
    return 0 if cache is None else int(cache.get_seq_length())
