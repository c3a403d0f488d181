"""Who computes a miss: the device that it is moved to, or the host's processor, where it lies.

Fiddler computes a miss on the host where that is sooner than to move it, each miss by itself.
HybriMoE, as we read it, looks at the queues instead: experts of few tokens are computed on the
host, those of many are moved, as long as that evens out the ends of both queues. So it is done
here. Experts are in order of their tokens; the host takes the one with the fewest, the link the one
with the most, whichever of the two would be over sooner; those whose bytes are not in host memory
yet come last, since both ways begin with reading them.

Such a greedy choice can be worse than none. So what it ends at is compared with moving everything
and with moving nothing, and the soonest of the three is taken: under the cost model a step never
ends later than with either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Miss(NamedTuple):
    """A request that has no slot on its device, which `rows` tokens ask for.

    Seconds that it takes: `read` into host memory (0 where it is there), `move` to the device, and
    to be computed, `there` or `here`, on the host.
    """

    request: int
    rows: int
    read: float
    move: float
    there: float
    here: float
    device: int = 0


@dataclass(slots=True)
class Queues:
    """When each link and processor is free, in seconds from now, if nothing more is asked of it.

    store: the link to host memory; links: each device's own
    """

    store: float
    links: list[float]
    devices: list[float]
    host: float = 0.0

    @classmethod
    def empty(cls, devices: int = 1) -> Queues:
        """Nothing is asked of anybody."""
        return cls(0.0, [0.0] * devices, [0.0] * devices)

    def copy(self) -> Queues:
        """The same, to be tried."""
        return Queues(self.store, self.links[:], self.devices[:], self.host)

    @property
    def end(self) -> float:
        """When all of the step is computed."""
        return max(self.host, *self.devices)

    def move(self, miss: Miss) -> float:
        """It is moved, after what was asked for before. When it is computed."""
        device, landed = miss.device, self._read(miss)
        if landed < self.links[device]:
            landed = self.links[device]
        landed += miss.move
        self.links[device] = landed
        if landed < self.devices[device]:
            landed = self.devices[device]
        self.devices[device] = landed + miss.there
        return self.devices[device]

    def stay(self, miss: Miss) -> float:
        """It is computed on the host, after what was asked for before. When it is."""
        self.host = max(self._read(miss), self.host) + miss.here
        return self.host

    def _read(self, miss: Miss) -> float:
        """When its bytes are in host memory."""
        if not miss.read:
            return 0.0
        self.store += miss.read
        return self.store

    def if_moved(self, miss: Miss) -> float:
        """When it would be computed on its device."""
        device = miss.device
        landed = max(self.store + miss.read if miss.read else 0.0, self.links[device]) + miss.move
        return max(landed, self.devices[device]) + miss.there

    def if_stays(self, miss: Miss) -> float:
        """When it would be computed on the host."""
        return max(self.store + miss.read if miss.read else 0.0, self.host) + miss.here


def assign(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """The requests that the host's processor computes, so that the step ends soonest; ascending.

    Where ends are equal, as few as may be: what is moved is there the next time.
    """
    line = _ordered(misses)
    everything = [miss.request for miss in line]
    plans = [[], everything] if len(line) == 1 else [[], _greedy(line, queues.copy()), everything]
    ends = [(_end(line, plan, queues), len(plan)) for plan in plans]
    return sorted(plans[ends.index(min(ends))])


def end_of(misses: Sequence[Miss], on_host: Collection[int], queues: Queues) -> float:
    """When a step ends whose misses are shared out so; what is in host memory goes first."""
    return _end(_ordered(misses), on_host, queues)


def _end(line: Sequence[Miss], on_host: Collection[int], queues: Queues) -> float:
    tried = queues.copy()
    for miss in line:
        if miss.request in on_host:
            tried.stay(miss)
        else:
            tried.move(miss)
    return tried.end


def _ordered(misses: Sequence[Miss]) -> list[Miss]:
    """As they are taken: those in host memory first, of these the ones with the most tokens."""
    return sorted(misses, key=lambda miss: (miss.read > 0, -miss.rows, miss.request))


def _greedy(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """From both ends of each device's line: most tokens to the device, fewest to the host.

    Of several devices the one whose next miss would be over first goes on, and the host takes from
    the one whose last would be over latest.
    """
    found = []
    for read in (False, True):
        lines: dict[int, list[Miss]] = {}
        for miss in misses:
            if (miss.read > 0) is read:
                lines.setdefault(miss.device, []).append(miss)
        while lines:
            if len(lines) == 1:
                (line,) = lines.values()
                most, fewest = line[0], line[-1]
            else:
                most = min((line[0] for line in lines.values()), key=queues.if_moved)
                fewest = max((line[-1] for line in lines.values()), key=queues.if_moved)
            moves = queues.if_moved(most) <= queues.if_stays(fewest)
            if moves:
                queues.move(most)
            else:
                queues.stay(fewest)
                found.append(fewest.request)
            line = lines[most.device if moves else fewest.device]
            del line[0 if moves else -1]
            if not line:
                del lines[most.device if moves else fewest.device]
    return found
