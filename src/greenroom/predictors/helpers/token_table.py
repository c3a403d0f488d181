"""A bounded table of learned values by token id; the least recently used id is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Ids

MOST_IDS, MOST_BYTES = 4096, 16 << 20


class TokenTable:
    """Table with a row of learned values for each of the most recent token ids.

    `rows` [places, ...] has at most 4,096 rows and 16 MiB. If the table is full, a new id gets the
    row of the id that was used longest ago, filled with zeros.
    """

    def __init__(self, row: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(row)) * np.dtype(dtype).itemsize
        most = min(MOST_IDS, max(1, MOST_BYTES // size))
        self.rows: NDArray[Any] = np.zeros((most, *row), dtype)
        self._place: dict[int, int] = {}
        self._id = np.full(most, -1, np.int64)  # the id that has each place
        self._met = np.zeros(most, np.int64)  # the pass in which that id was last seen
        self._pass = 0

    def of(self, ids: Ids | None, tokens: int) -> Ids:
        """Return the row numbers [tokens] of a pass's token ids; add new ids.

        A number is -1 if the ids are unknown, or if all rows belong to other ids of the same pass.
        """
        self._pass += 1
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
                if self._met[place] == self._pass:
                    return -1
                del self._place[int(self._id[place])]
                self.rows[place] = 0
            self._place[id_] = place
            self._id[place] = id_
        self._met[place] = self._pass
        return place

    def state(self) -> dict[str, NDArray[Any]]:
        used = len(self._place)
        arrays = {"ids": self._id, "met": self._met, "rows": self.rows}
        return {name: array[:used].copy() for name, array in arrays.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        used = min(len(state.get("ids", ())), self._id.size)
        for name, array in (("ids", self._id), ("met", self._met), ("rows", self.rows)):
            fill(name, state, array[:used])
        self._place = {id_: place for place, id_ in enumerate(self._id[:used].tolist())}
        if len(self._place) != used:
            raise ValueError("the saved token ids are not distinct")
        self._pass = int(self._met[:used].max(initial=0))


def fill(name: str, state: Mapping[str, NDArray[Any]], array: NDArray[Any]) -> None:
    """Copy the array `name` of a predictor's saved state into a given array.

    Raises ValueError if the saved array is missing or has another shape or dtype.
    """
    saved = state.get(name)
    if saved is None or saved.shape != array.shape or saved.dtype != array.dtype:
        text = "missing" if saved is None else f"{saved.dtype}{list(saved.shape)}"
        raise ValueError(f"the saved array {name} is {text}, not {array.dtype}{list(array.shape)}")
    array[...] = saved
