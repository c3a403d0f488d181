"""KV cache layers that store rows of bytes: what they hold after any sequence of changes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.kinds import CacheKind
from greenroom.hf.kv.quantised import QuantisedLayer
from greenroom.hf.kv.single_token import append_token, remove_token
from greenroom.runtime.kernels.dense.kv_rows import FORMATS

CONFIG = Qwen3MoeConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
WIDTHS = 40, 24  # of a key and of a value
MOVES = ["one", "one", "update", "block", "crop", "cut", "copy", "beam", "make", "reset", "begin"]


def draw(batch: int, tokens: int) -> list[torch.Tensor]:
    return [torch.randn(batch, 2, tokens, width) for width in WIDTHS]


def near(name: str, states: torch.Tensor) -> torch.Tensor:
    """What is left of keys or values once they were quantised."""
    form = FORMATS[name]
    return form.expand_by_torch(form.pack_by_torch(states), states.shape[-1])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(FORMATS)),
    st.lists(st.sampled_from(MOVES), max_size=25),
    st.integers(1, 12),
    st.booleans(),
    st.integers(1, 2),
)
def test_a_quantised_layer_holds_what_a_plain_one_would(name, moves, room, in_blocks, batch):
    torch.manual_seed(0)
    kind, block, kv.BLOCK = CacheKind(name), kv.BLOCK, 4
    try:
        ours, theirs = kind.cache(CONFIG, room, in_blocks), DynamicCache(config=CONFIG)
        for move in moves:
            tokens = theirs.get_seq_length()
            if move in ("one", "update", "block"):
                states = draw(batch, {"one": 1, "update": 2, "block": 9}[move])
                got = ours.update(*states, 0)
                expected = theirs.update(*(near(name, each) for each in states), 0)
                assert all(map(torch.equal, got, expected))
            elif move == "crop" and tokens > 1:
                ours.crop(-1)
                theirs.crop(-1)
            elif move == "cut" and tokens > 3:
                assert kv.truncate(ours, tokens - 3)
                theirs.crop(-3)
            elif move == "copy":
                ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
            elif move == "beam" and tokens:
                for each in (ours, theirs):
                    each.reorder_cache(torch.arange(batch).flip(0))
            elif move == "make":
                kv.make_room(ours, tokens + 5, lambda: None)
            elif move == "reset":
                ours.reset()
                theirs.reset()
            elif move == "begin" and tokens > 2:
                layers = [each.layers[0] for each in (ours, theirs)]
                assert kv.has_all_tokens(cache_of(layers[0]), tokens - 1)
                ours, theirs = (
                    begun(layer, tokens - 1, made)
                    for layer, made in zip(
                        layers,
                        (kind.cache(CONFIG, room, in_blocks), DynamicCache(config=CONFIG)),
                        strict=True,
                    )
                )
            assert ours.get_seq_length() == theirs.get_seq_length()
    finally:
        kv.BLOCK = block


def cache_of(layer: DynamicLayer) -> DynamicCache:
    cache = DynamicCache()
    cache.layers.append(layer)
    return cache


def begun(layer: DynamicLayer, tokens: int, cache: DynamicCache) -> DynamicCache:
    """A cache that begins with another one's first tokens."""
    return kv.copy_tokens(cache_of(layer), tokens, cache)


@pytest.mark.parametrize("name", FORMATS)
def test_layers_that_become_quantised_keep_their_tokens(name):
    cache, states = DynamicCache(config=CONFIG), draw(1, 5)
    cache.layers[1] = DynamicSlidingWindowLayer(sliding_window=6)
    for layer in range(2):
        cache.update(*states, layer)
    CacheKind(name).make_growing(cache)
    assert [type(layer) for layer in cache.layers] == [QuantisedLayer, DynamicSlidingWindowLayer]
    keys, _ = cache.update(*draw(1, 1), 0)
    assert torch.equal(keys[:, :, :5], near(name, states[0]))
    assert torch.equal(cache.layers[1].keys[:, :, :5], states[0])


def test_a_layer_made_later_is_quantised_too():
    cache = DynamicCache()
    CacheKind("int8").make_growing(cache)
    cache.update(*draw(1, 1), 1)
    assert [type(layer) for layer in cache.layers] == [QuantisedLayer, QuantisedLayer]


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_rows(name):
    cache = CacheKind(name).cache(CONFIG, in_blocks=True)
    cache.update(*draw(1, 300), 0)
    rows = sum(map(FORMATS[name].row_bytes, WIDTHS))
    assert kv.held_bytes(cache) == 2 * 512 * rows


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_appended_where_a_kernel_writes_it(name):
    cache = CacheKind(name).cache(CONFIG)
    assert append_token(cache, 0) is None  # nothing in it yet
    cache.update(*draw(1, 3), 0)
    view = append_token(cache, 0)
    assert view is not None
    assert (view.tokens, view.format) == (4, FORMATS[name].number)
    assert view.keys.dtype is torch.uint8
    assert view.keys.shape[3] == FORMATS[name].row_bytes(WIDTHS[0])
    remove_token(cache, 0)
    assert cache.get_seq_length() == 3
