"""Windows of keys and values that single tokens are appended to in place."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicSlidingWindowLayer

from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.in_place import WindowLayer
from greenroom.hf.kv.single_token import count_token, layer_stamps, layer_states

MOVES = ["one", "one", "one", "kernel", "kernel", "some", "crop", "copy", "beam", "past", "reset"]


def states(batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, batch, 2, tokens, 8).unbind()


def write(layer: WindowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append a token as a graph's kernel does."""
    where = layer_states([layer])
    if where is None:
        layer.update(keys, values)
        return
    row = layer.cumulative_length - where[0].dropped
    for buffer, new in zip(where[0][:2], (keys, values), strict=True):
        buffer[:, :, row : row + 1] = new
    count_token([layer])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(MOVES), max_size=30),
    st.integers(2, 9),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_a_window_that_grows_in_place_equals_one_that_copies(moves, window, block, batch):
    torch.manual_seed(0)
    theirs = DynamicSlidingWindowLayer(window)
    theirs.update(*states(batch, 3))
    ours, copies = WindowLayer.of(copy.deepcopy(theirs), block), []
    for move in moves:
        if move == "kernel" and theirs.cumulative_length:
            new = states(batch, 1)
            write(ours, *new)
            theirs.update(*new)
        elif move in ("one", "kernel", "some"):
            new = states(batch, 5 if move == "some" else 1)
            for got, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
                assert torch.equal(got, expected)
        elif move == "crop" and 1 < theirs.cumulative_length < window:
            ours.crop(-1)
            theirs.crop(-1)
        elif move == "copy":
            copies.append((ours, theirs))
            ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
        elif move == "beam" and theirs.cumulative_length:
            order = torch.arange(batch).flip(0)
            ours.batch_select_indices(order)
            theirs.batch_select_indices(order)
        elif move == "past" and theirs.cumulative_length:
            ours.activate_past_recording()
            theirs.activate_past_recording()
        elif move == "reset":
            ours.reset()
            theirs.reset()
    for a, b in [*copies, (ours, theirs)]:
        assert a.cumulative_length == b.cumulative_length
        assert a.get_mask_sizes(1) == b.get_mask_sizes(1)
        if b.cumulative_length:
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


def test_tensors_of_a_window_stay_until_they_are_full():
    layer = WindowLayer(4, 8)
    layer.update(*states(1, 3))
    stamps, lengths = [], []
    for _ in range(20):
        layer.update(*states(1, 1))
        stamps += layer_stamps([layer])
        lengths.append(layer._buffers[0].shape[2])
    assert len(set(stamps)) == 3  # 8 tokens each
    assert set(lengths) == {3 + 8}


@pytest.mark.parametrize("change", ["crop", "assign", "copy", "grow", "reset"])
def test_other_tensors_have_another_stamp(change):
    layer = kv.GrowingLayer(4, in_blocks=True)
    layer.update(*states(1, 3))
    before = layer_stamps([layer])
    assert before != layer_stamps([copy.deepcopy(layer)])
    if change == "crop":
        layer.crop(-1)
        assert layer_stamps([layer]) == before  # a kernel can go on in the same tensors
        return
    if change == "assign":
        layer.keys = layer.keys.clone()
    elif change == "copy":
        layer = copy.copy(layer)
        layer.keys = layer.keys.clone()
    elif change == "grow":
        layer.grow(kv.BLOCK + 1)
    else:
        layer.reset()
    assert layer_stamps([layer]) != before


def test_windows_of_a_gpu_alone_grow_in_place():
    for in_blocks in (False, True):
        cache = kv.DynamicCache()
        cache.layers = [DynamicSlidingWindowLayer(4), DynamicSlidingWindowLayer(9)]
        cache.update(*states(1, 3), 0)
        kv.make_growing(cache, in_blocks=in_blocks)
        kind = WindowLayer if in_blocks else DynamicSlidingWindowLayer
        assert [type(layer) for layer in cache.layers] == [kind] * 2
        assert kv.has_all_tokens(cache, 0)
        cache.update(*states(1, 1), 0)
        assert not kv.has_all_tokens(cache, 0)
        assert kv.held_bytes(cache) > 0
