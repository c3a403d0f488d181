"""Frames of the live page: the state of a run at one moment, as compact JSON.

A stream of frames begins with a greeting, which has what stays the same. Both are JSON objects;
docs/live-page.md describes their fields. Maps of experts are base64 text: two bits a state, one
bit for "used since the last frame", four bits a use level, each in the order of dense ids, lowest
bits first.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints

FORMAT = 1
MIDDLE, HIGHEST = 8, 15  # use levels: the layer's mean, and the most
SLICE = 2048  # experts whose use levels are in a frame
RECORDING_BYTES = 64 << 20  # of all maps of a recording
PER_OCTAVE = 2  # levels in which uses double


def states_text(states: NDArray[Any]) -> str:
    """Encode states of experts (0 to 3), two bits each."""
    padded = np.zeros((-(-states.size // 4), 4), np.uint8)
    padded.ravel()[: states.size] = states
    return _text(padded @ np.array([1, 4, 16, 64], np.uint8))


def flags_text(flags: NDArray[np.bool_]) -> str:
    """Encode a flag of each expert, one bit each."""
    return _text(np.packbits(flags, bitorder="little"))


def levels_text(levels: NDArray[np.uint8]) -> str:
    """Encode use levels of experts (0 to 15), four bits each."""
    padded = np.zeros((-(-levels.size // 2), 2), np.uint8)
    padded.ravel()[: levels.size] = levels
    return _text(padded @ np.array([1, 16], np.uint8))


def _text(packed: NDArray[np.uint8]) -> str:
    return b64encode(packed.tobytes()).decode()


def use_levels(uses: Ints, offsets: Ints) -> NDArray[np.uint8]:
    """Return how often each expert is used relative to its layer's mean, as levels.

    Level 0 is never. Each further level has uses of at least 2 ** ((level - 8) / 2) times the mean,
    and level 1 everything below. `offsets` are the first ids of the layers and the number of
    experts.
    """
    sizes = np.diff(offsets)
    averages = np.repeat(np.add.reduceat(uses, offsets[:-1]) / sizes, sizes)
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(uses / averages)
    levels = np.floor(MIDDLE + PER_OCTAVE * octaves)
    return np.where(uses > 0, np.clip(levels, 1, HIGHEST), 0).astype(np.uint8)


class LevelSlices:
    """Encodes experts' use levels, those of some layers in each frame.

    So a frame has a bounded size, and after a few frames a page has the levels of all layers.
    `offsets` are the first ids of the layers and the number of experts.
    """

    def __init__(self, offsets: Ints) -> None:
        self._offsets, self._first = np.asarray(offsets), 0

    def encode(self, uses: Ints) -> list[Any]:
        """Return the first layer's number and the encoded use levels of the next layers."""
        offsets, first = self._offsets, self._first
        most = offsets[first] + SLICE
        last = max(first + 1, int(np.searchsorted(offsets, most, side="right")) - 1)
        self._first = last if last < offsets.size - 1 else 0
        begin, end = offsets[first], offsets[last]
        part = offsets[first : last + 1] - begin
        return [first, levels_text(use_levels(uses[begin:end], part))]


def all_levels(uses: Ints, offsets: Ints) -> str:
    """Encode the use levels of all experts, as a greeting has them (see `use_levels`)."""
    return levels_text(use_levels(uses, np.asarray(offsets)))


def most_frames(experts: int, limit: int) -> int:
    """Return how many frames of a model a recording may have, at most `limit`.

    The maps of all frames together have a bounded size.
    """
    return max(1, min(limit, RECORDING_BYTES // (experts // 2 + SLICE)))


def greeting(
    kind: str, title: str, experts_per_layer: Sequence[int], **more: Any
) -> dict[str, Any]:
    """Return the first object of a stream of frames.

    `kind` is live, trace or timeline.
    """
    layers = [int(experts) for experts in experts_per_layer]
    return {"format": FORMAT, "kind": kind, "title": title, "layers": layers, **more}
