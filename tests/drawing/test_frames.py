"""The encodings of a frame's maps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from greenroom.drawing.frames import (
    HIGHEST,
    MIDDLE,
    SLICE,
    LevelSlices,
    all_levels,
    flags_text,
    levels_text,
    states_text,
    use_levels,
)
from tests.drawing.decode import unpack


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256])
def test_values_are_packed_lowest_bits_first(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 16, size)
    assert unpack(states_text(values % 4), 2, size) == (values % 4).tolist()
    assert unpack(flags_text(values % 2 == 1), 1, size) == (values % 2).tolist()
    assert unpack(levels_text(values.astype(np.uint8)), 4, size) == values.tolist()


def test_use_levels_are_relative_to_the_layer_s_mean() -> None:
    offsets = np.array([0, 4, 6])
    uses = np.array([10, 20, 0, 10, 0, 0])  # the means are 10 and 0
    assert use_levels(uses, offsets).tolist() == [MIDDLE, MIDDLE + 2, 0, MIDDLE, 0, 0]


def test_use_levels_have_bounds() -> None:
    uses = np.array([1, *[1 << 40] * 99, *[0] * 900, 3, 0])
    levels = use_levels(uses, np.array([0, 1000, 1002]))
    assert levels[0] == 1
    assert levels[1] == MIDDLE + math.floor(2 * math.log2(1000 / 99))
    assert use_levels(np.array([1 << 40] + [0] * 999), np.array([0, 1000]))[0] == HIGHEST


def test_slices_cover_all_layers_in_turn() -> None:
    sizes = [3, SLICE, 1, SLICE + 5, 700, 700, 700, 2]  # two layers are larger than a slice
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    uses = np.random.default_rng(0).integers(0, 100, offsets[-1])
    levels, slices = use_levels(uses, offsets).tolist(), LevelSlices(offsets)
    assert unpack(all_levels(uses, offsets), 4, len(levels)) == levels
    seen, layer = [], 0
    while not (seen and layer == 0):
        first, text = slices.encode(uses)
        assert first == layer
        count, last = 0, first
        while last < len(sizes) and (last == first or count + sizes[last] <= SLICE):
            count, last = count + sizes[last], last + 1
        seen += unpack(text, 4, count)
        layer = last % len(sizes)
    assert seen == levels
