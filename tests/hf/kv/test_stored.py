"""Keys and values as bytes, and back, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from greenroom.hf.kv.kinds import CacheKind
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.kv.stored import (
    StoredBlock,
    add_tokens,
    copy_in,
    copy_out,
    refusal_reason,
    tensors_of,
    token_range,
    window_lengths,
)
from greenroom.hf.memory.setup import ModelSetup

HEADS, WIDTH = 2, 4
PLAIN = CacheKind()


def setup_of(kind: CacheKind = PLAIN) -> ModelSetup:
    catalog: Any = None
    return ModelSetup(catalog, 1, context=64, keys_values=KVBytes((), kind))


def config(sliding: bool) -> Any:
    shape: Any = {"num_hidden_layers": 4, "head_dim": WIDTH, "num_key_value_heads": HEADS}
    if sliding:
        return GptOssConfig(**shape, sliding_window=8)
    return Qwen3MoeConfig(**shape)


def filled(
    of: Any, tokens: int, dtype: torch.dtype = torch.bfloat16, kind: CacheKind = PLAIN
) -> DynamicCache:
    """A KV cache with `tokens` tokens, added in two passes."""
    cache = DynamicCache(config=of)
    kind.make_growing(cache, 64)
    random = torch.Generator().manual_seed(tokens)
    for count in (tokens // 2, tokens - tokens // 2):
        for layer in range(4):
            keys, values = torch.randn(2, 1, HEADS, count, WIDTH, generator=random).to(dtype)
            cache.update(keys, values, layer)
    return cache


def stored(cache: Any, windows: Any, tokens: int, size: int) -> list[Any]:
    """The (first token, blocks, bytes) of every range of `size` tokens."""
    ranges, buffer = [], np.empty(1 << 16, np.uint8)
    for begin in range(0, tokens, size):
        end = min(begin + size, tokens)
        parts = token_range(tensors_of(cache, windows), windows, begin, end, end == tokens)
        blocks = [StoredBlock.of(part) for part in parts]
        data = copy_out(parts, buffer)
        assert data.size == sum(block.nbytes for block in blocks)
        ranges.append((begin, blocks, data.copy()))
    return ranges


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("tokens", [5, 21, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_come_back_bit_by_bit(
    sliding: bool, tokens: int, dtype: torch.dtype
) -> None:
    of = config(sliding)
    model: Any = type("Model", (), {"config": of})
    windows = window_lengths(model, 64)
    assert (7 in windows) == sliding
    before = filled(of, tokens, dtype)
    ranges, after = stored(before, windows, tokens, 8), DynamicCache(config=of)
    room = add_tokens(after, tokens, ranges[-1][1], windows, setup_of(), "cpu")
    for number, (begin, blocks, data) in enumerate(ranges):
        copy_in(data, blocks, room, windows, begin, number == len(ranges) - 1)
    assert after.get_seq_length() == tokens
    more = torch.randn(2, 1, HEADS, 3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    for layer in range(4):
        old, new = before.layers[layer], after.layers[layer]
        assert old.get_seq_length() == new.get_seq_length() == tokens
        assert torch.equal(old.keys, new.keys)
        assert torch.equal(old.values, new.values)
        for a, b in zip(before.update(*more, layer), after.update(*more, layer), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_keys_and_values_come_back_as_they_were_stored(name: str) -> None:
    quantised = setup_of(CacheKind(name))
    of, windows = config(True), (7, 0, 7, 0)
    before = filled(of, 21, kind=CacheKind(name))
    ranges, after = stored(before, windows, 21, 8), DynamicCache(config=of)
    room = add_tokens(after, 21, ranges[-1][1], windows, quantised, "cpu")
    for begin, blocks, data in ranges:
        copy_in(data, blocks, room, windows, begin, begin == 16)
    more = torch.randn(2, 1, HEADS, 3, WIDTH).bfloat16()
    for layer in range(4):
        assert torch.equal(before.layers[layer].keys, after.layers[layer].keys)
        for a, b in zip(before.update(*more, layer), after.update(*more, layer), strict=True):
            assert torch.equal(a, b)


def test_a_part_of_a_range_can_be_used_without_windows() -> None:
    of, windows = config(False), (0,) * 4
    before, after = filled(of, 21), DynamicCache(config=of)
    ranges = stored(before, windows, 21, 8)
    room = add_tokens(after, 18, ranges[-1][1], windows, setup_of(), "cpu")
    for begin, blocks, data in ranges:
        copy_in(data, blocks, room, windows, begin, begin == 16)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert torch.equal(old.keys[:, :, :18], new.keys)


def test_a_window_longer_than_the_context_counts_as_full_attention() -> None:
    model: Any = type("Model", (), {"config": config(True)})
    assert window_lengths(model, 7) == (0,) * 4
    assert set(window_lengths(model, 8)) == {0, 7}


def test_a_cache_without_tokens_or_with_other_layers_has_no_tensors() -> None:
    cache = DynamicCache(config=config(False))
    assert tensors_of(cache, (0,) * 4) == []
    assert tensors_of(filled(config(False), 4), (0,) * 3) == []


def test_other_kinds_of_caches_are_refused_by_name() -> None:
    model: Any = type("Other", (), {})()
    model.config = config(False)
    kind = type("Kind", (), {"name": "offloaded"})
    model.greenroom = type("G", (), {"setup": type("S", (), {
        "keys_values": type("K", (), {"kind": kind})})})  # fmt: skip
    assert refusal_reason(model).startswith("--kv offloaded has keys and values of another form")
