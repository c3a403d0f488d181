"""What a step asks for: its distinct experts and the rows that each of them computes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Routing:
    """The rows of a step, sorted by expert.

    Expert `experts[i]` (local ids, ascending) computes the entries `starts[i]:starts[i + 1]` of
    `tokens` and `ranks`, in the order of `k, t = torch.where(top_k_index.T == e)`: by rank, then
    by token. `rows` is `tokens * top_k + ranks`, an entry's row in the step's output. Ids that
    are no expert of this layer (an expert-parallel run marks foreign ones with `num_experts`)
    appear nowhere. The arrays are int64 and lie one after another from `address` on: experts,
    starts, tokens, ranks, rows.
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
        """Sort `top_k_index` [tokens, top_k]; ids lie in [0, num_experts] or above."""
        if len(top_k_index) == 1:
            return cls._of_one(top_k_index[0].tolist(), num_experts)
        tokens, top_k = top_k_index.shape
        flat = top_k_index.T.ravel()
        order = np.argsort(flat, kind="stable")
        ids = flat[order]
        kept = int(np.searchsorted(ids, num_experts))
        order, ids = order[:kept], ids[:kept]
        heads = np.flatnonzero(np.diff(ids, prepend=-1))
        ranks, at = np.divmod(order, tokens)
        data = np.concatenate((ids[heads], heads, [kept], at, ranks, at * top_k + ranks))
        return cls._cut((tokens, top_k), len(heads), kept, data, data.ctypes.data)

    @classmethod
    def _of_one(cls, ids: list[int], num_experts: int) -> Routing:
        """One token, the case of every decode step: Python's sort beats NumPy's calls."""
        pairs = sorted([(e, k) for k, e in enumerate(ids) if e < num_experts])
        experts: list[int] = []
        starts: list[int] = []
        for at, (expert, _) in enumerate(pairs):
            if not experts or experts[-1] != expert:
                experts.append(expert)
                starts.append(at)
        ranks, kept = [k for _, k in pairs], len(pairs)
        packed = array("q", [*experts, *starts, kept, *[0] * kept, *ranks, *ranks])
        data = np.frombuffer(packed, np.int64)  # keeps `packed`, and so its address, alive
        return cls._cut((1, len(ids)), len(experts), kept, data, packed.buffer_info()[0])

    @classmethod
    def _cut(
        cls, shape: tuple[int, int], count: int, kept: int, data: NDArray[np.int64], address: int
    ) -> Routing:
        """Name the parts of `data`."""
        a, b = count, 2 * count + 1
        c, d = b + kept, b + 2 * kept
        return cls(shape, data[:a], data[a:b], data[b:c], data[c:d], data[d:], address)

    def counts_and_weights(
        self, weights: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(rows, sums of gate weights) of each expert; `weights` [tokens, top_k].

        As a trace tells them: weights in float16, summed exactly and rounded once. So a policy
        that looks at them does in a replay what it did in the run.
        """
        rows = self.row_counts()
        if not rows.size:
            return rows, np.empty(0, np.float32)
        each = weights.astype(np.float16).astype(np.float64).ravel()[self.rows]
        return rows, np.add.reduceat(each, self.starts[:-1]).astype(np.float32)

    def row_counts(self) -> NDArray[np.int32]:
        """Rows of each expert."""
        return np.diff(self.starts).astype(np.int32)

    def entries(self, expert: int) -> slice:
        """Where an expert's rows lie in `tokens`, `ranks` and `rows`."""
        i = int(np.searchsorted(self.experts, expert))
        return slice(int(self.starts[i]), int(self.starts[i + 1]))
