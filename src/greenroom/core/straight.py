"""Steps of which nothing is to be awaited or decided: every piece has a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.core.pieces import Ints
from greenroom.core.residence import Residence
from greenroom.core.whole import Tables, Whole


class Straight(Residence):
    """The way past the event machine, while there is a slot for every piece (see `whole`)."""

    _whole: Whole | None = None

    def straight(self, pieces: Ints) -> Ints | None:
        """The slots of a step's pieces (ascending), where all of them have one and nothing will be
        evicted: the step is over with this, and its pieces are to be computed. None where it must
        be `Routed`."""
        if self._whole is None or (used := self._whole.use(pieces)) is None:
            return None
        self._count(pieces.size)
        slots: Ints = self.place[used]
        return slots

    def at_once(self, first: int, asked: Ints, find: Callable[[Tables], int]) -> bool:
        """As `straight`, for compiled code: `find(tables)` looks the slots of a step's pieces up,
        notes their use in these tables and in `asked`, and says how many they were; 0 where one
        has no slot. `first` is the layer's first piece."""
        if (whole := self._whole) is None:
            return False
        tables = whole.tables(asked, self.place)
        tables[0] = first
        if not (found := find(tables)):
            return False
        whole.noted()
        self._count(found)
        return True

    def several(self, asked: Ints, find: Callable[[Tables], Sequence[int]]) -> int | None:
        """As `at_once` for steps that follow one another, of whose layers `find` knows the first
        pieces; the tables are the first step's. It says how many pieces each had, up to the first
        of which one has no slot. How many steps were done; None where it was not asked."""
        if (whole := self._whole) is None:
            return None
        found = find(whole.tables(asked, self.place))
        for pieces in found:
            whole.noted()
            self._count(pieces)
        return len(found)

    def _count(self, pieces: int) -> None:
        """A step has found all of its pieces."""
        self.counts.steps += 1
        self.counts.requests += pieces
        self.counts.hits += pieces

    def _no_longer_whole(self) -> None:
        """The policy hears what it was not told of."""
        if self._whole is not None:
            self._whole.tell()
            self._whole = None
