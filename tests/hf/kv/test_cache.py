"""Keys and values that grow in place."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from mmap import PAGESIZE

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.single_token import append_token
from greenroom.runtime.memory.system import rss_bytes

CONFIG = Qwen3MoeConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)


def filled(tokens: int, batch: int = 1) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4), 0)
    return cache


def add(cache: DynamicCache, k: torch.Tensor, v: torch.Tensor) -> None:
    room = append_token(cache, 0)
    assert room is not None
    last = slice(room.tokens - 1, room.tokens)
    room.keys[:, :, last], room.values[:, :, last] = k, v


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "one",
                "one",
                "one",
                "update",
                "block",
                "crop",
                "cut",
                "copy",
                "beam",
                "make",
                "reset",
            ]
        ),
        max_size=30,
    ),
    st.integers(1, 12),
    st.booleans(),
    st.integers(1, 2),
)
def test_a_growing_cache_equals_one_that_copies(moves, room, in_blocks, batch):
    torch.manual_seed(0)
    block, kv.BLOCK = kv.BLOCK, 4
    try:
        ours, copies = filled(3, batch), []
        theirs = copy.deepcopy(ours)
        kv.make_growing(ours, room, in_blocks)
        for move in moves:
            if move == "one" and batch == 1 and theirs.get_seq_length():
                k, v = torch.randn(2, 1, 2, 1, 4).unbind()
                add(ours, k, v)
                theirs.update(k, v, 0)
            elif move in ("one", "update", "block"):
                k, v = torch.randn(2, batch, 2, {"one": 1, "update": 2, "block": 9}[move], 4)
                for got, expected in zip(ours.update(k, v, 0), theirs.update(k, v, 0), strict=True):
                    assert torch.equal(got, expected)
            elif move == "crop" and theirs.get_seq_length() > 1:
                ours.crop(-1)
                theirs.crop(-1)
            elif move == "cut" and theirs.get_seq_length() > 3:
                assert kv.truncate(ours, theirs.get_seq_length() - 3)
                theirs.crop(-3)
            elif move == "copy":
                copies.append((ours, theirs))
                ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
            elif move == "beam" and theirs.get_seq_length():
                order = torch.arange(batch).flip(0)
                ours.reorder_cache(order)
                theirs.reorder_cache(order)
            elif move == "make":
                kv.make_room(ours, theirs.get_seq_length() + 5, lambda: None)
            elif move == "reset":
                ours.reset()
                theirs.reset()
        for a, b in [*copies, (ours, theirs)]:
            assert a.get_seq_length() == b.get_seq_length()
            if b.get_seq_length():
                assert torch.equal(a.layers[0].keys, b.layers[0].keys)
                assert torch.equal(a.layers[0].values, b.layers[0].values)
    finally:
        kv.BLOCK = block


def buffer_count(step: Callable[[DynamicCache], object], cache: DynamicCache, steps: int) -> int:
    """Count the different buffers of the keys over some steps."""
    addresses = set()
    for _ in range(steps):
        step(cache)
        addresses.add(cache.layers[0].keys.data_ptr())
    return len(addresses)


def test_nothing_is_copied_within_the_room():
    one = torch.randn(1, 2, 1, 4)
    cache = DynamicCache()
    kv.make_growing(cache, 300)
    assert buffer_count(lambda c: c.update(one, one, 0), cache, 300) == 1
    assert buffer_count(lambda c: append_token(c, 0), cache, 200) == 1  # the room ends on a page
    cache = DynamicCache()
    kv.make_growing(cache, 300, in_blocks=True)
    assert buffer_count(lambda c: c.update(one, one, 0), cache, 2 * kv.BLOCK) == 2


def test_a_layer_made_later_grows_too_and_others_stay_as_they_are():
    cache = DynamicCache()
    kv.make_growing(cache)
    cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 1)
    assert [type(layer) for layer in cache.layers] == [kv.GrowingLayer, kv.GrowingLayer]
    static = StaticCache(CONFIG, max_cache_len=8)
    kv.make_growing(static)
    assert not any(isinstance(layer, kv.GrowingLayer) for layer in static.layers)
    kv.make_growing(None)


def test_a_cache_of_inference_mode_grows_outside_of_it():
    with torch.inference_mode():
        cache = filled(3)
        kv.make_growing(cache)
        cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
    assert cache.layers[0].keys[0, 0, -2:, 0].tolist() == [1, 0]


def test_gradients_flow_as_through_a_plain_layer():
    cache = filled(3)
    kv.make_growing(cache)
    k = torch.ones(1, 2, 1, 4, requires_grad=True)
    cache.update(k, k, 0)[0].sum().backward()
    assert torch.equal(k.grad, torch.ones_like(k))


def test_pages_take_memory_from_the_first_write_until_the_cache_is_freed():
    cache = DynamicCache()
    kv.make_growing(cache, 1 << 16)
    states = torch.ones(1, 4, 512, 128)
    cache.update(states, states, 0)
    before = rss_bytes()
    for _ in range(31):
        cache.update(states, states, 0)
    size = 31 * 2 * states.nbytes  # 31 MiB a tensor
    assert size * 0.9 < rss_bytes() - before < size * 1.2
    assert kv.held_bytes(cache) == 32 * 2 * states.nbytes
    del cache
    gc.collect()
    assert rss_bytes() - before < size * 0.1


def test_bytes_of_caches_of_any_kind_are_counted():
    plain = filled(3)
    assert kv.held_bytes(plain) == 2 * 2 * 3 * 4 * 4
    kv.make_growing(plain)
    append_token(plain, 0)
    assert kv.held_bytes(plain) == 4 * PAGESIZE  # heads, of keys and of values
    blocks = filled(3)
    kv.make_growing(blocks, in_blocks=True)
    append_token(blocks, 0)
    assert kv.held_bytes(blocks) == 2 * 2 * kv.BLOCK * 4 * 4
    assert kv.held_bytes(None) == 0
    static = StaticCache(CONFIG, max_cache_len=8)
    static.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert 2 * 2 * 8 * 4 * 4 <= kv.held_bytes(static) < 2 * 2 * 8 * 4 * 4 + 100


@pytest.mark.parametrize("freed", [0, 1 << 40])
def test_outgrown_tensors_are_released_layer_by_layer(freed, monkeypatch):
    monkeypatch.setattr(kv, "FREED", freed)
    cache, released = DynamicCache(), []
    kv.make_growing(cache, in_blocks=True)
    for layer in range(3):
        cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), layer)
    kv.make_room(cache, kv.BLOCK, lambda: released.append(1))
    assert not released  # there is room
    kv.make_room(cache, kv.BLOCK + 1, lambda: released.append(1))
    assert len(released) == (1 if freed else 3)
    assert cache.layers[2].keys.shape[2] == cache.get_seq_length() == 5


def test_append_token_refuses_other_caches():
    assert append_token(StaticCache(CONFIG, max_cache_len=8), 0) is None
    assert append_token(DynamicCache(), 0) is None  # nothing in it yet
    assert append_token(filled(3), 1) is None  # no such layer yet
    assert append_token(filled(3, batch=2), 0) is None
    assert append_token(None, 0) is None


def sliding(tokens: int) -> DynamicCache:
    """A layer of full attention, and one that looks at 6 tokens."""
    cache = DynamicCache(config=CONFIG)
    cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=6)
    for _ in range(tokens):
        for layer in range(2):
            cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), layer)
    return cache


def test_tokens_of_a_failed_pass_are_truncated_in_place():
    cache = filled(9)
    kv.make_growing(cache, 64)
    k, v = torch.randn(2, 1, 2, 3, 4)
    cache.update(k, v, 0)
    place, expected = cache.layers[0].keys.data_ptr(), cache.layers[0].keys[:, :, :9].clone()
    assert kv.truncate(cache, 9)
    assert torch.equal(cache.layers[0].keys, expected)
    cache.update(k, v, 0)
    assert cache.layers[0].keys.data_ptr() == place
    assert torch.equal(cache.layers[0].keys[:, :, 9:], k)
    assert kv.truncate(cache, 20)  # it has fewer
    assert cache.get_seq_length() == 12
    assert kv.truncate(None, 0)
    assert not kv.truncate(None, 3)


def test_tokens_outside_of_a_window_cannot_be_restored():
    cache = sliding(4)
    kv.make_growing(cache)
    assert kv.has_all_tokens(cache, 3)
    assert not kv.has_all_tokens(cache, 5)
    assert kv.truncate(cache, 3)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]
    cache = sliding(9)
    kv.make_growing(cache)
    assert not kv.has_all_tokens(cache, 3)
    assert not kv.truncate(cache, 8)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]  # nothing was done
    assert kv.truncate(cache, 9)
    assert not kv.truncate(StaticCache(CONFIG, max_cache_len=8), 1)
    assert not kv.has_all_tokens(StaticCache(CONFIG, max_cache_len=8), 1)


def test_the_first_tokens_of_a_cache_can_begin_another():
    cache = sliding(5)
    kv.make_growing(cache)
    other = kv.copy_tokens(cache, 4, sliding(0))
    for mine, theirs in zip(other.layers, cache.layers, strict=True):
        assert mine.get_seq_length() == 4
        assert torch.equal(mine.keys, theirs.keys[:, :, :4])
        assert torch.equal(mine.values, theirs.values[:, :, :4])
        mine.keys.zero_()
        assert theirs.keys.abs().sum() > 0
