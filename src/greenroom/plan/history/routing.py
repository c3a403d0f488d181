"""Routing of a model's earlier runs: resident experts, popularity and learned states.

MoE-Infinity stores its collection of activation matrices for the same purpose (appendix, failure
recovery).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.cache.scope import Scope, split_capacity

log = logging.getLogger(__name__)

Ids = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RoutingHistory:
    """Routing of earlier runs of a model; ids of experts count over all layers.

    hot:        experts that were in the cache at the end of the last run, most valuable first
    popularity: number of requests for each expert, [experts]
    states:     arrays of predictors and other observers of routing, by the observer's name; arrays
                of eviction policies are named `policy NAME`
    """

    hot: Ids
    popularity: NDArray[np.float64]
    states: Mapping[str, Arrays] = field(default_factory=dict)

    @classmethod
    def of_counts(cls, requests: NDArray[Any]) -> RoutingHistory:
        """Make a routing history from the number of requests for each expert, [experts]."""
        return cls(np.empty(0, np.int64), requests.astype(np.float64))

    def with_policy(self, name: str, learned: Arrays) -> RoutingHistory:
        """Copy a routing history, with what an eviction policy has learned on one device."""
        state = {f"0/{array_name}": array for array_name, array in learned.items()}
        return replace(self, states={**self.states, f"policy {name}": state})

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> RoutingHistory:
        """Make a routing history from the arrays of its file.

        KeyError or ValueError if an array is missing or has a wrong shape, type or name.
        """
        hot, popularity = arrays["hot"], arrays["popularity"]
        if (hot.ndim, popularity.ndim) != (1, 1) or hot.dtype != np.int64:
            raise ValueError("the arrays `hot` and `popularity` have wrong shapes or types")
        states: dict[str, dict[str, NDArray[Any]]] = {}
        for name, array in arrays.items():
            if name not in ("hot", "popularity"):
                _, owner, array_name = name.split("/", 2)
                states.setdefault(owner, {})[array_name] = array
        return cls(hot, popularity.astype(np.float64), states)

    def arrays(self, limit: int) -> Arrays:
        """Return a routing history's arrays by name: `hot`, `popularity`, `states/OWNER/NAME`.

        OWNER is the name of a predictor or another observer. The largest states are left out, with
        a warning, until all arrays fit into `limit` bytes. ValueError for an owner with a slash.
        """
        arrays: dict[str, NDArray[Any]] = {
            "hot": np.ascontiguousarray(self.hot, np.int64),
            "popularity": np.ascontiguousarray(self.popularity, np.float64),
        }
        left = limit - sum(array.nbytes for array in arrays.values())
        sizes = {name: sum(a.nbytes for a in state.values()) for name, state in self.states.items()}
        stored = sorted(sizes, key=sizes.__getitem__)
        while stored and sum(sizes[name] for name in stored) > left:
            log.warning(
                "what %s has learned is too large to be stored for later runs", stored.pop()
            )
        for name in stored:
            if "/" in name:
                raise ValueError(f"the name of a predictor cannot have a slash: {name!r}")
            state = self.states[name].items()
            arrays |= {
                f"states/{name}/{array_name}": np.asarray(a, order="C") for array_name, a in state
            }
        return arrays

    def hot_set(self, offsets: Sequence[int], capacity: int, scope: Scope = "shared") -> Ids:
        """List the experts to load at the start of a run, most valuable first.

        Experts that were in the cache at the end of the last run come first, then those that were
        requested most. Experts that were never requested, and ids that the model does not have, are
        left out. `capacity` is the number of cache slots; with any scope but `shared` no layer gets
        more than its share of them. `offsets` [layers + 1] are the ids, counted over all layers, at
        which layers begin. The list is empty if the history does not fit the model.
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
