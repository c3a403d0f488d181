"""The router's choices for some tokens in one MoE layer, sorted by expert."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.compiling.compile_cache import jit
from greenroom.core.compiling.steady_call import SteadyCall

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choices for some tokens in one MoE layer, sorted by expert.

    A choice is a pair (token, rank): the expert of rank r is the token's r-th choice, 0 to top_k -
    1. `experts` are the ids of the distinct chosen experts, ascending. The choices of `experts[i]`
    are the entries `starts[i]:starts[i + 1]` of the arrays `tokens`, `ranks` and `rows`. They are
    ordered by rank, then by token, as `torch.where(top_k_index.T == expert)` orders them. `rows` is
    `tokens * top_k + ranks`.

    Ids from the layer's number of experts on are left out: an expert-parallel run marks experts of
    other processes with them. `shape` is (number of tokens, top_k). The arrays are int64 and lie
    one after another in memory from `address` on: experts, starts, tokens, ranks, rows.
    """

    shape: tuple[int, int]
    experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    address: int

    @classmethod
    def of(cls, top_k_index: NDArray[np.int64], num_experts: int) -> Routing:
        """Sort a router's chosen expert ids [tokens, top_k] by expert.

        Ids from `num_experts` on belong to other processes, and are left out.
        """
        if len(top_k_index) == 1:
            return cls.of_token(top_k_index[0].tolist(), num_experts)
        index = np.ascontiguousarray(top_k_index, np.int64)
        data = np.empty(2 * num_experts + 1 + 3 * index.size, np.int64)
        count, local = _sort_choices(index, np.zeros(num_experts, np.int64), data)
        return cls._cut(index.shape, count, local, data, data.ctypes.data)

    @classmethod
    def of_token(cls, ids: Sequence[int], num_experts: int) -> Routing:
        """Sort the ids of one token, like `of`: Python's sort beats NumPy's calls."""
        pairs = sorted([(e, k) for k, e in enumerate(ids) if e < num_experts])
        experts: list[int] = []
        starts: list[int] = []
        for at, (expert, _) in enumerate(pairs):
            if not experts or experts[-1] != expert:
                experts.append(expert)
                starts.append(at)
        ranks, local = [k for _, k in pairs], len(pairs)
        packed = array("q", [*experts, *starts, local, *[0] * local, *ranks, *ranks])
        data = np.frombuffer(packed, np.int64)  # keeps `packed`, and so its address, alive
        return cls._cut((1, len(ids)), len(experts), local, data, packed.buffer_info()[0])

    @classmethod
    def _cut(
        cls, shape: tuple[int, int], count: int, local: int, data: NDArray[np.int64], address: int
    ) -> Routing:
        """Split an int64 array into the fields for `count` experts and `local` choices."""
        a, b = count, 2 * count + 1
        c, d, e = b + local, b + 2 * local, b + 3 * local
        return cls(shape, data[:a], data[a:b], data[b:c], data[c:d], data[d:e], address)

    def counts_and_weights(
        self, weights: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return each routed expert's number of tokens and sum of gate weights.

        `weights` are the gate weights [tokens, top_k]. They are rounded to float16, as a recorded
        trace stores them, then summed exactly and rounded once to float32. So a cache policy that
        uses the sums decides the same in a simulation of the trace as in the run.
        """
        rows = self.row_counts()
        if not rows.size:
            return rows, np.empty(0, np.float32)
        each = weights.astype(np.float16).astype(np.float64).ravel()[self.rows]
        return rows, np.add.reduceat(each, self.starts[:-1]).astype(np.float32)

    def write_sum_order(self, out: IntArray) -> None:
        """Write the order in which each token's expert outputs are summed: [T, top_k, 2].

        Each pair is (entry, index of its gate weight). Entries are ordered by ascending expert; -1
        fills up the pairs of a token with fewer experts.
        """
        _order_sums(self.tokens, self.rows, np.zeros(self.shape[0], np.int64), out)

    def tiles(self, experts: Sequence[int], offsets: Sequence[int], most: int) -> IntArray:
        """Split the entries of experts into tiles of at most so many entries: [tiles, 4].

        Each tile is (its expert's offset, the expert, first entry, number of entries).
        """
        tiles = np.empty((len(experts) + self.rows.size // most, 4), np.int64)
        group = np.array((experts, offsets), np.int64)
        return tiles[: _split_entries(group, self.experts, self.starts, most, tiles)]

    def row_counts(self) -> NDArray[np.int32]:
        """Return the number of tokens that each routed expert computes, as int32."""
        return np.diff(self.starts).astype(np.int32)

    def entries(self, expert: int) -> slice:
        """Return where one expert's entries lie in the arrays sorted by expert.

        The result is a slice of `tokens`, `ranks` and `rows`.
        """
        i = int(np.searchsorted(self.experts, expert))
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    def entries_of(self, experts: Sequence[int]) -> list[range]:
        """Return the numbers of each expert's entries, of those that `entries` has."""
        starts = self.starts.tolist()
        place = {expert: i for i, expert in enumerate(self.experts.tolist())}
        return [range(starts[place[e]], starts[place[e] + 1]) for e in experts]


@jit(_nrt=False)
def sort_choices(index: IntArray, counts: IntArray, out: IntArray) -> tuple[int, int]:
    """Write the arrays of a `Routing`, one after another.

    index:  [tokens, top_k]
    counts: [experts], 0 each; changes
    out:    [2 * experts + 1 + 3 * tokens * top_k] or more

    Returns the number of chosen experts, and that of choices of the layer's own experts.
    """
    (tokens, top_k), experts = index.shape, counts.size
    for token in range(tokens):
        for rank in range(top_k):
            if index[token, rank] < experts:
                counts[index[token, rank]] += 1
    chosen = local = 0
    for expert in range(experts):
        chosen += counts[expert] > 0
    at = 0
    for expert in range(experts):
        count = counts[expert]
        if count:
            out[at], out[chosen + at] = expert, local
            at += 1
        counts[expert] = local
        local += count
    out[2 * chosen] = local
    first = 2 * chosen + 1
    for rank in range(top_k):
        for token in range(tokens):
            expert = index[token, rank]
            if expert < experts:
                place = first + counts[expert]
                counts[expert] += 1
                out[place], out[place + local] = token, rank
                out[place + 2 * local] = token * top_k + rank
    return chosen, local


@jit(_nrt=False)
def order_sums(tokens: IntArray, rows: IntArray, counts: IntArray, out: IntArray) -> None:
    """Do what `Routing.write_sum_order` does; `counts` [tokens], 0 each, change."""
    out[:] = -1
    for entry in range(tokens.size):
        token = tokens[entry]
        out[token, counts[token], 0], out[token, counts[token], 1] = entry, rows[entry]
        counts[token] += 1


@jit(_nrt=False)
def split_entries(
    group: IntArray, experts: IntArray, starts: IntArray, most: int, out: IntArray
) -> int:
    """Do what `Routing.tiles` does; `group` is [2, n]. Returns the number of tiles."""
    tiles = 0
    for i in range(group.shape[1]):
        at = np.searchsorted(experts, group[0, i])
        first, end = starts[at], starts[at + 1]
        while first < end:
            out[tiles, 0], out[tiles, 1] = group[1, i], group[0, i]
            out[tiles, 2], out[tiles, 3] = first, min(most, end - first)
            tiles, first = tiles + 1, first + most
    return tiles


_sort_choices, _order_sums, _split_entries = map(
    SteadyCall, (sort_choices, order_sums, split_entries)
)
