"""Co-compute's choice of a processor for each missing expert: device or host.

Fiddler computes a miss on the host if that is sooner than moving it, each miss by itself. HybriMoE,
as we read it, looks at the queues instead: experts with few tokens are computed on the host and
experts with many are moved, so that both queues end at about the same time. Greenroom does the
latter. Misses are in order of their tokens; the host takes the miss with the fewest tokens or the
link takes the one with the most, whichever would end sooner. Misses whose bytes are not in host
memory come last, since both ways begin with reading them.

This greedy choice can take longer than sending all misses the same way. So its end is compared with
those of moving every miss and of moving none, and the soonest of the three is taken: under the cost
model a step never ends later than with either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Miss(NamedTuple):
    """A requested expert without a device slot, with its expected durations in seconds.

    request:   the index of the expert in its step
    rows:      the number of tokens that chose the expert
    read:      its read from disk into host memory; 0 if it is in host memory already
    move:      its transfer from host memory to the device
    on_device, on_host: its computation on the device, or on the host
    device:    the device that the expert is assigned to
    """

    request: int
    rows: int
    read: float
    move: float
    on_device: float
    on_host: float
    device: int = 0


@dataclass(slots=True)
class Queues:
    """Simulated queues of links and processors: the seconds until each is free.

    store:   the link from disk to host memory
    links:   each device's link from host memory
    devices: each device's processor
    host:    the host's processor
    """

    store: float
    links: list[float]
    devices: list[float]
    host: float = 0.0

    @classmethod
    def empty(cls, devices: int = 1) -> Queues:
        """Make empty queues of links and processors."""
        return cls(0.0, [0.0] * devices, [0.0] * devices)

    def copy(self) -> Queues:
        """Copy the queues of links and processors, to try an assignment of experts."""
        return Queues(self.store, self.links[:], self.devices[:], self.host)

    @property
    def end(self) -> float:
        """Return the seconds until all queued experts of a layer's step are computed."""
        return max(self.host, *self.devices)

    def move(self, miss: Miss) -> float:
        """Queue a missing expert's transfer to its device, and its computation there.

        Returns the seconds until it is computed.
        """
        device, landed = miss.device, self._read(miss)
        if landed < self.links[device]:
            landed = self.links[device]
        landed += miss.move
        self.links[device] = landed
        if landed < self.devices[device]:
            landed = self.devices[device]
        self.devices[device] = landed + miss.on_device
        return self.devices[device]

    def compute_on_host(self, miss: Miss) -> float:
        """Queue a missing expert's computation on the host, after its read from disk.

        An expert that is in host memory already is not read. Returns the seconds until the expert
        is computed.
        """
        self.host = max(self._read(miss), self.host) + miss.on_host
        return self.host

    def _read(self, miss: Miss) -> float:
        """Queue the read of a missing expert into host memory.

        Returns the seconds until its bytes are there.
        """
        if not miss.read:
            return 0.0
        self.store += miss.read
        return self.store

    def end_if_moved(self, miss: Miss) -> float:
        """Return the seconds until a missing expert would be computed on its device."""
        device = miss.device
        landed = max(self.store + miss.read if miss.read else 0.0, self.links[device]) + miss.move
        return max(landed, self.devices[device]) + miss.on_device

    def end_if_on_host(self, miss: Miss) -> float:
        """Return the seconds until a missing expert would be computed on the host."""
        return max(self.store + miss.read if miss.read else 0.0, self.host) + miss.on_host


def assign(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """Choose which missing experts the host computes, so that their layer ends soonest.

    Returns the indices of these experts in their step, ascending. If several choices end at the
    same time, the host computes as few experts as possible: an expert that is moved is resident the
    next time.
    """
    ordered = _ordered(misses)
    every = [miss.request for miss in ordered]
    plans = [[], every] if len(ordered) == 1 else [[], _greedy(ordered, queues.copy()), every]
    ends = [(_end(ordered, plan, queues), len(plan)) for plan in plans]
    return sorted(plans[ends.index(min(ends))])


def count_on_host(count: int, miss: Miss, queues: Queues) -> int:
    """Choose how many of equal misses, whose bytes are in host memory, the host computes.

    These are the last ones. The choice is that of `assign`, which takes longer.
    """
    host, link, device = queues.host, queues.links[miss.device], queues.devices[miss.device]
    on_host, moved = [host], [device]  # the ends with none, one, two ...
    for _ in range(count):
        host += miss.on_host
        link += miss.move
        device = max(link, device) + miss.on_device
        on_host.append(host)
        moved.append(device)
    greedy = moves = 0
    while greedy + moves < count:
        if moved[moves + 1] <= on_host[greedy + 1]:
            moves += 1
        else:
            greedy += 1
    ends = [(max(on_host[n], moved[count - n]), n) for n in (0, greedy, count)]
    return min(ends)[1]


def end_with(misses: Sequence[Miss], on_host: Collection[int], queues: Queues) -> float:
    """Return the seconds until a layer's step ends if the host computes given experts.

    on_host: the indices of these experts in their step

    Experts that are in host memory already go first.
    """
    return _end(_ordered(misses), on_host, queues)


def _end(ordered: Sequence[Miss], on_host: Collection[int], queues: Queues) -> float:
    trial = queues.copy()
    for miss in ordered:
        if miss.request in on_host:
            trial.compute_on_host(miss)
        else:
            trial.move(miss)
    return trial.end


def _ordered(misses: Sequence[Miss]) -> list[Miss]:
    """Sort missing experts: those in host memory first, then by descending tokens."""
    return sorted(misses, key=lambda miss: (miss.read > 0, -miss.rows, miss.request))


def _greedy(misses: Sequence[Miss], queues: Queues) -> list[int]:
    """Divide missing experts between device and host, from both ends of each device's queue.

    Returns the indices in the step of the experts for the host.

    The device takes the miss with the most tokens, the host the one with the fewest. With several
    devices, the device whose next miss would end first goes on, and the host takes from the device
    whose last miss would end latest.
    """
    requests = []
    for read in (False, True):
        waiting: dict[int, list[Miss]] = {}
        for miss in misses:
            if (miss.read > 0) is read:
                waiting.setdefault(miss.device, []).append(miss)
        while waiting:
            if len(waiting) == 1:
                (queue,) = waiting.values()
                most, fewest = queue[0], queue[-1]
            else:
                most = min((queue[0] for queue in waiting.values()), key=queues.end_if_moved)
                fewest = max((queue[-1] for queue in waiting.values()), key=queues.end_if_moved)
            moves = queues.end_if_moved(most) <= queues.end_if_on_host(fewest)
            if moves:
                queues.move(most)
            else:
                queues.compute_on_host(fewest)
                requests.append(fewest.request)
            queue = waiting[most.device if moves else fewest.device]
            del queue[0 if moves else -1]
            if not queue:
                del waiting[most.device if moves else fewest.device]
    return requests
