"""Routing of earlier runs: resident experts, popularity and predictors' states.

MoE-Infinity (appendix, failure recovery) stores its collection in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.scope import Scope, split_capacity

log = logging.getLogger(__name__)

Ids = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RoutingHistory:
    """Routing of earlier runs of a model with E experts; ids are dense.

    hot:        experts that were resident at the end [n], most valuable first
    popularity: how often each expert was requested [E]
    states:     counts of predictors and other observers, by name
    """

    hot: Ids
    popularity: NDArray[np.float64]
    states: Mapping[str, Arrays] = field(default_factory=dict)

    @classmethod
    def of_counts(cls, requests: NDArray[Any]) -> RoutingHistory:
        """Make a routing history from the number of requests for each expert [E]."""
        return cls(np.empty(0, np.int64), requests.astype(np.float64))

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> RoutingHistory:
        """Read a routing history from a file's arrays. KeyError or ValueError for others."""
        hot, popularity = arrays["hot"], arrays["popularity"]
        if (hot.ndim, popularity.ndim) != (1, 1) or hot.dtype != np.int64:
            raise ValueError("its arrays have other shapes or types")
        states: dict[str, dict[str, NDArray[Any]]] = {}
        for name, array in arrays.items():
            if name not in ("hot", "popularity"):
                _, owner, array_name = name.split("/", 2)
                states.setdefault(owner, {})[array_name] = array
        return cls(hot, popularity.astype(np.float64), states)

    def arrays(self, limit: int) -> Arrays:
        """Return a routing history's arrays by name: `hot`, `popularity`, `states/OWNER/NAME`.

        While they exceed `limit` bytes the largest state is left out. ValueError for an
        owner with a slash.
        """
        arrays: dict[str, NDArray[Any]] = {
            "hot": np.ascontiguousarray(self.hot, np.int64),
            "popularity": np.ascontiguousarray(self.popularity, np.float64),
        }
        left = limit - sum(array.nbytes for array in arrays.values())
        sizes = {name: sum(a.nbytes for a in state.values()) for name, state in self.states.items()}
        stored = sorted(sizes, key=sizes.__getitem__)
        while stored and sum(sizes[name] for name in stored) > left:
            log.warning("the state of predictor %s is too large to be stored", stored.pop())
        for name in stored:
            if "/" in name:
                raise ValueError(f"no predictor's name: {name!r}")
            state = self.states[name].items()
            arrays |= {
                f"states/{name}/{array_name}": np.asarray(a, order="C") for array_name, a in state
            }
        return arrays

    def hot_set(self, offsets: Sequence[int], capacity: int, scope: Scope = "shared") -> Ids:
        """List the experts to load into the cache at the start, most valuable first.

        The cache has `capacity` slots.

        `offsets` [L + 1] are the dense ids at which layers begin. Experts that were resident at the
        end of the last run come first, then those that were requested most; experts that were never
        requested are left out. With scope `per-layer` no layer gets more than its share. Ids that
        cannot be of this model are skipped.
        """
        groups = np.array(split_capacity(capacity, len(offsets) - 1, scope), np.int64)
        experts, popularity = int(offsets[-1]), self.popularity
        if popularity.shape != (experts,) or not np.isfinite(popularity).all():
            return np.empty(0, np.int64)
        by_popularity = np.argsort(-popularity, kind="stable")
        candidates = np.concatenate([self.hot, by_popularity[popularity[by_popularity] > 0]])
        candidates = candidates[(candidates >= 0) & (candidates < experts)]
        _, firsts = np.unique(candidates, return_index=True)
        candidates = candidates[np.sort(firsts)]
        if scope == "shared":
            return candidates[:capacity]
        layer = np.searchsorted(offsets, candidates, "right") - 1
        earlier = np.array([np.count_nonzero(layer[:i] == each) for i, each in enumerate(layer)])
        return candidates[earlier < groups[layer]] if candidates.size else candidates
