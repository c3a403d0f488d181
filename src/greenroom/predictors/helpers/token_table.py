"""Where what is known of token ids lies: a bounded table, from which the longest unmet leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Ids

MOST_IDS, MOST_BYTES = 4096, 16 << 20


class TokenTable:
    """`rows` [places, ...] has a row for each id that is known, of zeros when it is new."""

    def __init__(self, row: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(row)) * np.dtype(dtype).itemsize
        most = min(MOST_IDS, max(1, MOST_BYTES // size))
        self.rows: NDArray[Any] = np.zeros((most, *row), dtype)
        self._place: dict[int, int] = {}
        self._id = np.full(most, -1, np.int64)  # the id that has each place
        self._met = np.zeros(most, np.int64)  # the pass in which it was last met
        self._now = 0

    def of(self, ids: Ids | None, tokens: int) -> Ids:
        """[tokens] the rows of a pass's ids; -1 where none are told, or all rows are taken by
        others of this very pass.
        """
        self._now += 1
        places = np.full(tokens, -1, np.int64)
        if ids is not None:
            for token, id_ in enumerate(ids.tolist()):
                places[token] = self._of(id_)
        return places

    def _of(self, id_: int) -> int:
        place = self._place.get(id_, -1)
        if place < 0:
            place = len(self._place)
            if place == self._id.size:
                place = int(self._met.argmin())
                if self._met[place] == self._now:
                    return -1
                del self._place[int(self._id[place])]
                self.rows[place] = 0
            self._place[id_] = place
            self._id[place] = id_
        self._met[place] = self._now
        return place

    def state(self) -> dict[str, NDArray[Any]]:
        known = len(self._place)
        kept = {"ids": self._id, "met": self._met, "rows": self.rows}
        return {name: array[:known].copy() for name, array in kept.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        known = min(len(state.get("ids", ())), self._id.size)
        for name, array in (("ids", self._id), ("met", self._met), ("rows", self.rows)):
            filled(name, state, array[:known])
        self._place = {id_: place for place, id_ in enumerate(self._id[:known].tolist())}
        if len(self._place) != known:
            raise ValueError("ids are not distinct")
        self._now = int(self._met[:known].max(initial=0))


def filled(name: str, state: Mapping[str, NDArray[Any]], array: NDArray[Any]) -> None:
    """Fill an array from a saved state. ValueError where what is there does not fit."""
    saved = state.get(name)
    if saved is None or saved.shape != array.shape or saved.dtype != array.dtype:
        there = "missing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
        raise ValueError(f"{name} is {there}, not {array.dtype}{list(array.shape)}")
    array[...] = saved
