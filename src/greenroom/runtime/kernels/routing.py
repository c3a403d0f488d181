"""What a step asks for: its distinct experts and the rows that each of them computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Routing:
    """The rows of a step, sorted by expert.

    Expert `experts[i]` (local ids, ascending) computes the entries `starts[i]:starts[i + 1]` of
    `tokens` and `ranks`, in the order of `k, t = torch.where(top_k_index.T == e)`: by rank, then
    by token. `rows` is `tokens * top_k + ranks`, an entry's row in the step's output.
    All arrays are int64. Ids that are no expert of this layer (an expert-parallel run marks
    foreign ones with `num_experts`) appear nowhere.
    """

    shape: tuple[int, int]
    experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]

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
        return cls(
            (tokens, top_k), ids[heads], np.append(heads, kept), at, ranks, at * top_k + ranks
        )

    @classmethod
    def _of_one(cls, ids: list[int], num_experts: int) -> Routing:
        """One token, the case of every decode step: Python's sort beats NumPy's calls."""
        pairs = sorted((e, k) for k, e in enumerate(ids) if e < num_experts)
        experts, starts = [], []
        for at, (expert, _) in enumerate(pairs):
            if not experts or experts[-1] != expert:
                experts.append(expert)
                starts.append(at)
        ranks = np.array([k for _, k in pairs], np.int64)
        return cls(
            (1, len(ids)),
            np.array(experts, np.int64),
            np.array([*starts, len(pairs)], np.int64),
            np.zeros(len(pairs), np.int64),
            ranks,
            ranks,
        )

    def entries(self, expert: int) -> slice:
        """Where an expert's rows lie in `tokens`, `ranks` and `rows`."""
        i = int(np.searchsorted(self.experts, expert))
        return slice(int(self.starts[i]), int(self.starts[i + 1]))
