"""The router's choices for some tokens in one MoE layer, sorted by expert."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        tokens, top_k = top_k_index.shape
        flat = top_k_index.T.ravel()
        order = np.argsort(flat, kind="stable")
        ids = flat[order]
        local = int(np.searchsorted(ids, num_experts))
        order, ids = order[:local], ids[:local]
        heads = np.flatnonzero(np.diff(ids, prepend=-1))
        ranks, at = np.divmod(order, tokens)
        data = np.concatenate((ids[heads], heads, [local], at, ranks, at * top_k + ranks))
        return cls._cut((tokens, top_k), len(heads), local, data, data.ctypes.data)

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
        c, d = b + local, b + 2 * local
        return cls(shape, data[:a], data[a:b], data[b:c], data[c:d], data[d:], address)

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
