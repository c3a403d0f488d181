"""The words of layers that follow one another, made once and renewed for every token.

To make them takes Python a twentieth of a token's time. From one token to the next there change the
addresses of what comes in and goes out, the place of keys and values, and what the bodies count in:
so all words are kept once more, where they are set in a few operations on vectors, and a body
copies them over those that the last token has used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.codegen.entries import choice, layers
from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer, Place
from greenroom.runtime.kernels.dense.router import RouterCall
from greenroom.runtime.kernels.dense.stored import scratch
from greenroom.runtime.kernels.launch.openmp import BARRIER, kernel_entry
from greenroom.runtime.kernels.resident.one_token import OneTokenExperts
from greenroom.runtime.slots.resident_tables import SlotTables

AHEAD = 256  # tokens that a program has room to work for, beside those of its first
STEP_WORD = choice.STEP - choice.FIRST_PIECE  # of SlotTables, and the last of it
# What words that change are counted from: the addresses of a token's inputs and outputs, then the
# words of SlotTables after the first.
NONE, X, OUT, COS, SIN, TABLES = range(6)
STEP = TABLES + STEP_WORD - 1


class Change(NamedTuple):
    """A word that is another for each token: a base's value, a number, and one for each token."""

    where: int  # in all words
    layer: int
    base: int
    number: int = 0
    each: int = 0


class LaunchPlan:
    """Layers that follow one another, for one token after another of a cache."""

    def __init__(
        self,
        links: Sequence[FusedDecoderLayer],
        experts: Sequence[OneTokenExperts],
        firsts: Sequence[int],
        x: Tensor,
        positions: Positions,
        rooms: Sequence[KeyValueView],
    ) -> None:
        """For tokens like x [1, 1, hidden]; `firsts` are the layers' first pieces."""
        self._count, self._rotary = len(links), positions[0].shape[-1]
        self._most = AHEAD + max(room.tokens for room in rooms)
        # Not to be kept alive: a cache goes when its answer does, and with it its memory.
        self._rooms = [(ref(room.keys), ref(room.values)) for room in rooms]
        self._bytes = x.nbytes  # of an output
        self._bases: Ints = np.zeros(STEP + 1, np.int64)
        # What only lives from stage to stage is the same memory in all layers.
        self.residual, self.state = torch.empty(2, 1, x.shape[-1], dtype=x.dtype).unbind()
        self._work = max((link.work(self._most) for link in links), key=Tensor.numel)
        self._memory = max((each.room() for each in experts), key=Tensor.numel)
        self._strides = (
            max(link.one.stride for link in links),
            max(each.stride for each in experts),
        )
        self._kernel = experts[0]
        self._scratch = self._scratches()  # before any of its addresses is written down

        self.asked: list[RouterCall] = []
        self._found: list[tuple[array[int], int]] = []
        self._entries: list[list[int]] = []
        stages: list[list[array[int]]] = []
        for link, room, own, first in zip(links, rooms, experts, firsts, strict=True):
            before, asked = link.up_to_choice(
                x, positions, room, self.residual, self.state, self._work
            )
            planned = own.planned(
                self.state.data_ptr(),
                asked.ids.data_ptr(),
                asked.weights.data_ptr(),
                self.residual.data_ptr(),
                self._memory,
                first,
            )
            entries = [n for each, words in before for n in (each.address, _address(words))]
            self._entries.append([*entries, 0, asked.found, *planned.entries])
            self._found.append((planned.words, planned.found))
            self.asked.append(asked)
            stages.append([*(words for _, words in before), planned.words])
        self._keep(stages)
        changes = np.array(list(self._changes(stages, links, experts, rooms)))
        self._where, self._layer, self._base, self._number, self._each = changes.T.copy()
        self._regions = {0: self._region(0)}

    def _keep(self, stages: Sequence[Sequence[array[int]]]) -> None:
        """All words once more, and the words of `renew`."""
        live = [words for layer in stages for words in layer]
        self._words: Ints = np.concatenate([np.frombuffer(words, np.int64) for words in live])
        self._live = live
        self._renew, start = array("q", (0, len(live))), self._words.ctypes.data
        for words in live:
            self._renew.extend((_address(words), start, len(words)))
            start += 8 * len(words)

    def _changes(
        self,
        stages: Sequence[Sequence[array[int]]],
        links: Sequence[FusedDecoderLayer],
        direct: Sequence[OneTokenExperts],
        rooms: Sequence[KeyValueView],
    ) -> Iterator[Change]:
        """The words of all layers that change."""
        keys = [_rows(room.keys) for room in rooms]
        values = [_rows(room.values) for room in rooms]
        start = 0
        for n, (layer, link, experts) in enumerate(zip(stages, links, direct, strict=True)):
            begins = [start + at for at in accumulate([0, *map(len, layer)])]
            start, last = begins.pop(), begins[-1]

            def each(places: Sequence[Place], begins: list[int] = begins) -> Iterator[int]:
                return (begins[stage] + word for stage, word in places)

            places, tables = link.places, last + experts.tables
            for at in each(places.x):  # the first layer's is the model's own
                yield Change(at, n, OUT, (n - 1) * self._bytes) if n else Change(at, n, X)
            for base, own in ((COS, places.cos), (SIN, places.sin)):
                yield from (Change(at, n, base) for at in each(own))
            for (address, row), own in ((keys[n], places.key), (values[n], places.value)):
                yield from (Change(at, n, NONE, address - row, row) for at in each(own))
            yield from (Change(at, n, NONE, 0, 1) for at in each(places.tokens))
            yield from (Change(last + at, n, OUT, n * self._bytes) for at in experts.outputs)
            yield from (Change(tables + i, n, TABLES + i - 1) for i in range(1, STEP_WORD))
            yield Change(tables + STEP_WORD, n, STEP, n)

    def _region(self, first: int) -> array[int]:
        """The words of `in_turn` for the layers from number `first` on."""
        entries = [n for each in self._entries[first:] for n in each]
        renew = kernel_entry(layers.copy_arguments, torch.float32).address, _address(self._renew)
        return array("q", (1 + len(entries) // 2, BARRIER, *renew, *entries))

    def _scratches(self) -> tuple[int, int]:
        """Where the memory lies that this thread's kernels share."""
        dense, experts = self._strides
        return scratch(dense), self._kernel.scratch(experts)

    def fits(self, positions: Positions, rooms: Sequence[KeyValueView]) -> bool:
        """Do the addresses that are kept hold for this token too?"""
        return (
            all(
                keys() is room.keys and values() is room.values
                for (keys, values), room in zip(self._rooms, rooms, strict=True)
            )
            and max(room.tokens for room in rooms) <= self._most
            and positions[0].shape[-1] == self._rotary
            and self._scratches() == self._scratch
        )

    def set(
        self, x: Tensor, positions: Positions, rooms: Sequence[KeyValueView], outputs: Tensor
    ) -> None:
        """The next token, and where the layers' outputs [layers, 1, 1, hidden] go."""
        tokens = np.array([room.tokens for room in rooms])
        self._values = self._number + self._each * tokens[self._layer]
        given = (x, outputs, *positions)
        self._bases[X : SIN + 1] = [each.data_ptr() for each in given]

    def run(self, first: int, tables: SlotTables) -> list[int]:
        """Compute the layers from number `first` on: how many experts each had, until one whose
        choice is torch's or whose experts have no slots. `tables` are those of the first."""
        self._bases[TABLES : STEP + 1] = tables[1:]
        self._bases[STEP] -= first
        self._words[self._where] = self._values + self._bases[self._base]
        self._renew[0] = 0
        if first not in self._regions:
            self._regions[first] = self._region(first)
        kernel_entry(layers.run_stages, torch.float32)(_address(self._regions[first]))
        found = [each[at] for each, at in self._found[first:]]
        return found[: found.index(0)] if 0 in found else found


def _address(words: array[int]) -> int:
    return words.buffer_info()[0]


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Where keys or values begin, and bytes from token to token."""
    return tensor.data_ptr(), tensor.stride(2) * tensor.itemsize
