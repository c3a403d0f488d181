"""Room for one more token in a KV cache."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from greenroom.hf import kv


def filled(tokens: int, batch: int = 1) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4), 0)
    return cache


def add(cache: DynamicCache, k: torch.Tensor, v: torch.Tensor) -> None:
    room = kv.reserve(cache, 0)
    assert room is not None
    room[0][:, :, -1:], room[1][:, :, -1:] = k, v


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["reserve", "reserve", "reserve", "update", "crop", "copy", "beam"]),
        max_size=30,
    ),
    st.integers(1, 5),
)
def test_as_a_cache_that_copies(moves, spare):
    torch.manual_seed(0)
    kv_spare, kv.SPARE = kv.SPARE, spare
    try:
        ours, kept = filled(3), []
        theirs = copy.deepcopy(ours)
        for move in moves:
            if move == "reserve":
                k, v = torch.randn(2, 1, 2, 1, 4).unbind()
                add(ours, k, v)
                theirs.update(k, v, 0)
            elif move == "update":
                k, v = torch.randn(2, 1, 2, 2, 4).unbind()
                ours.update(k, v, 0)
                theirs.update(k, v, 0)
            elif move == "crop" and theirs.get_seq_length() > 1:
                ours.crop(-1)
                theirs.crop(-1)
            elif move == "copy":
                kept.append((ours, theirs))
                ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
            elif move == "beam":
                ours.reorder_cache(torch.tensor([0]))
                theirs.reorder_cache(torch.tensor([0]))
        for a, b in [*kept, (ours, theirs)]:
            assert torch.equal(a.layers[0].keys, b.layers[0].keys)
            assert torch.equal(a.layers[0].values, b.layers[0].values)
            assert a.get_seq_length() == b.get_seq_length()
    finally:
        kv.SPARE = kv_spare


def test_only_every_64th_token_copies():
    cache, places = filled(3), set()
    for _ in range(2 * kv.SPARE):
        kv.reserve(cache, 0)
        places.add(cache.layers[0].keys.data_ptr())
    assert len(places) == 2


def test_others_are_left_to_update():
    config = Qwen3MoeConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    assert kv.reserve(StaticCache(config, max_cache_len=8), 0) is None
    assert kv.reserve(DynamicCache(), 0) is None  # nothing in it yet
    assert kv.reserve(filled(3), 1) is None  # no such layer yet
    assert kv.reserve(filled(3, batch=2), 0) is None
    assert kv.reserve(None, 0) is None
