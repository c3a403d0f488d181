"""Who computes a miss: the device that it is moved to, or the host's processor, where it lies.

Fiddler computes a miss on the host where that is sooner than to move it, each miss by itself.
HybriMoE (section 4.2 of its paper, as we read it) looks at the queues instead: experts of few
tokens are computed on the host, those of many are moved, as long as that evens out the ends of both
queues. So it is done here. Experts are in order of their tokens; the host takes the one with the
fewest, the link the one with the most, whichever of the two would be over sooner; those whose bytes
are not in host memory yet come last, since both ways begin with reading them.

Such a greedy choice can be worse than none. So what it ends at is compared with moving everything
and with moving nothing, and the soonest of the three is taken: under the cost model a step never
ends later than with either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from greenroom.core.events import HOST
from greenroom.core.rates import Rates


class Miss(NamedTuple):
    """A request that has no slot on its device. `kept`: its bytes are in host memory."""

    request: int
    rows: int
    nbytes: int
    kept: bool = True
    device: int = 0


@dataclass(slots=True)
class Queues:
    """When each link and processor is free, in seconds from now, if nothing more is asked of it.

    links: the one from the store, then each device's own
    """

    rates: Rates
    links: list[float]
    devices: list[float]
    host: float = 0.0

    @classmethod
    def empty(cls, rates: Rates, devices: int = 1) -> Queues:
        """Nothing is asked of anybody."""
        return cls(rates, [0.0] * (1 + devices), [0.0] * devices)

    def copy(self) -> Queues:
        """The same, to be tried."""
        return Queues(self.rates, list(self.links), list(self.devices), self.host)

    @property
    def end(self) -> float:
        """When all of the step is computed."""
        return max(self.host, *self.devices)

    def moved(self, miss: Miss) -> tuple[float, float, float]:
        """(its bytes are in host memory, on the device, it is computed), where it is moved."""
        there = self._in_host(miss)
        own = 1 + miss.device
        landed = max(there, self.links[own]) + self.rates.link(own, miss.nbytes)
        begins = max(landed, self.devices[miss.device])
        return there, landed, begins + self.rates.processor(miss.device, (miss.rows,), miss.nbytes)

    def here(self, miss: Miss) -> tuple[float, float]:
        """(its bytes are in host memory, it is computed), on the host."""
        there = self._in_host(miss)
        return there, max(there, self.host) + self.rates.processor(HOST, (miss.rows,), miss.nbytes)

    def _in_host(self, miss: Miss) -> float:
        return 0.0 if miss.kept else self.links[0] + self.rates.link(0, miss.nbytes)

    def move(self, miss: Miss) -> None:
        """It is moved, after what was asked for before."""
        there, self.links[1 + miss.device], self.devices[miss.device] = self.moved(miss)
        self.links[0] = max(self.links[0], there)

    def stay(self, miss: Miss) -> None:
        """It is computed on the host, after what was asked for before."""
        there, self.host = self.here(miss)
        self.links[0] = max(self.links[0], there)


def assign(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """The requests that the host's processor computes, so that the step ends soonest; ascending.

    Where ends are equal, as few as may be: what is moved is there the next time.
    """
    everything = [miss.request for miss in misses]
    plans: list[list[int]] = [[], _greedy(misses, queues.copy()), everything]
    ends = [(end_of(misses, plan, queues), len(plan)) for plan in plans]
    return sorted(plans[ends.index(min(ends))])


def end_of(misses: Sequence[Miss], on_host: Collection[int], queues: Queues) -> float:
    """When a step ends whose misses are shared out so; what is in host memory goes first."""
    tried = queues.copy()
    for miss in _ordered(misses):
        (tried.stay if miss.request in on_host else tried.move)(miss)
    return tried.end


def _ordered(misses: Sequence[Miss]) -> list[Miss]:
    """As they are taken: those in host memory first, of these the ones with the most tokens."""
    return sorted(misses, key=lambda miss: (not miss.kept, -miss.rows, miss.request))


def _greedy(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """From both ends of each device's line: most tokens to the device, fewest to the host.

    Of several devices the one whose next miss would be over first goes on, and the host takes from
    the one whose last would be over latest.
    """
    found = []
    for kept in (True, False):
        lines: dict[int, list[Miss]] = {}
        for miss in _ordered(misses):
            if miss.kept is kept:
                lines.setdefault(miss.device, []).append(miss)
        while lines:
            most = min((line[0] for line in lines.values()), key=lambda m: queues.moved(m)[-1])
            fewest = max((line[-1] for line in lines.values()), key=lambda m: queues.moved(m)[-1])
            if queues.moved(most)[-1] <= queues.here(fewest)[-1]:
                queues.move(most)
                line = lines[most.device]
                del line[0]
            else:
                queues.stay(fewest)
                found.append(fewest.request)
                line = lines[fewest.device]
                del line[-1]
            if not line:
                lines = {device: line for device, line in lines.items() if line}
    return found
