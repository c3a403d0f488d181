"""Rates of links and processors: a cost model, corrected by measurements during a run.

Times are in seconds, sizes in bytes. The cost model is a machine's profile, or what was measured
when the model was loaded. Each link and processor has a correction: a moving average of the ratio
of measured to expected times. The link to a device has two: chunks that threads move wait for these
threads too, and copies in order with the computation do not. While the host's processor is not
used, its correction moves back towards 1, so that one slow moment does not exclude it for good.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.cost import Costs
from greenroom.core.events import HOST
from greenroom.core.options.rules.processors import Miss
from greenroom.errors import UsageError

DECAY = 0.9  # of a correction at each sample: about the last ten count
LIMIT = 4.0  # samples are clipped to this factor of the correction, against outliers
FADE = 0.99  # of a correction at each step that does not use the processor
TRIES = 4  # steps whose copies in order are measured before they may be left out


class Correction:
    """A correction of the cost model: a moving average of measured / expected times."""

    def __init__(self) -> None:
        self.value = 1.0

    def add(self, expected: float, seconds: float) -> None:
        """Add the ratio of a measured time to the expected one to the moving average."""
        if expected > 0 and seconds > 0:
            ratio = min(max(seconds / expected, self.value / LIMIT), self.value * LIMIT)
            self.value = DECAY * self.value + (1 - DECAY) * ratio

    def fade(self) -> None:
        """Move a cost model's correction towards 1, after a layer without a measurement."""
        self.value = 1 + FADE * (self.value - 1)


class Rates:
    """Expected times of links, devices and the host, corrected by measurements.

    costs:        the cost model of the links from disk to host to device, and of the processors of
                  device and host
    expert_bytes: the size of the experts that `costs` describes
    learn:        whether measurements correct the cost model

    UsageError if `costs` has no times of the host's processor, or not two links.
    """

    def __init__(
        self, costs: Costs, expert_bytes: int, devices: int = 1, learn: bool = True
    ) -> None:
        self.set_costs(costs)
        self._bytes, self._learn = expert_bytes, learn
        self._links = [Correction() for _ in range(1 + devices)]
        self._in_order = Correction()  # of the first device's link
        self._copied = 0  # steps whose copies in order were measured
        self._processors = {device: Correction() for device in (HOST, *range(devices))}
        self._began: dict[tuple[int, int], float] = {}  # chunks on (link, lane)
        self._landed = [float("-inf")] * (1 + devices)  # when each link last delivered

    def set_costs(self, costs: Costs) -> None:
        """Replace the cost model of links and processors; measured corrections stay.

        UsageError if `costs` has no times of the host's processor, or not two links.
        """
        if costs.host is None or len(costs.links) != 2:
            raise UsageError(
                "--co-compute divides missing experts between a device and the host's processor: it"
                " needs links from disk to host to device, and measured times of both processors"
                " (greenroom doctor)"
            )
        self._costs, self._host = costs, costs.host

    # ---- expected times

    def link(self, link: int, nbytes: float, in_order: bool = False) -> float:
        """Return the expected seconds of a transfer of bytes over a link.

        link:     0 for the link from disk to host memory, 1 + device for a device's link
        in_order: of copies that wait for no thread; on the first device's link
        """
        correction = self._in_order if in_order else self._links[link]
        return correction.value * nbytes / self._costs.links[min(link, 1)].bandwidth

    def processor(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        """Return the seconds in which a processor is expected to compute several experts.

        device: the number of a device, or `HOST`
        rows:   the number of tokens of each expert
        nbytes: the size of an expert
        """
        return self._processors[device].value * self._expected(device, rows, nbytes)

    def miss(
        self,
        request: int,
        rows: int,
        nbytes: int,
        in_host: bool,
        device: int,
        in_order: bool = False,
    ) -> Miss:
        """Describe a missing expert by its expected transfer and computation times.

        request:  the index of the expert in its step
        rows:     the number of tokens that chose the expert
        nbytes:   the size of the expert
        in_host:  its bytes are in host memory
        in_order: see `link`
        """
        read = 0.0 if in_host else self.link(0, nbytes)
        move = self.link(1 + device, nbytes, in_order)
        on_device, on_host = (self.processor(p, (rows,), nbytes) for p in (device, HOST))
        return Miss(request, rows, read, move, on_device, on_host, device)

    def _expected(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        work = self._host if device == HOST else self._costs.expert
        return sum(work.seconds(n) for n in rows) * nbytes / self._bytes

    # ---- measurements

    def chunk_started(self, link: int, lane: int, now: float) -> None:
        """Record when a link began to transfer a chunk, to measure the link's rate."""
        self._began[link, lane] = now

    def chunk_landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """Correct a link's rate by the time that a chunk took.

        The time is measured from the chunk's start, or from the arrival of the chunk before if that
        is later.
        """
        since = max(self._began.pop((link, lane)), self._landed[link])
        self._landed[link] = now
        if self._learn:
            bandwidth = self._costs.links[min(link, 1)].bandwidth
            self._links[link].add(nbytes / bandwidth, now - since)

    def copied(self, nbytes: int, seconds: float) -> None:
        """Correct the rate of copies in order by those of a step that have ended."""
        if self._learn:
            self._copied += 1
            self._in_order.add(nbytes / self._costs.links[1].bandwidth, seconds)

    @property
    def tries_copies(self) -> bool:
        """Tell whether a step should move some expert in order, since their rate is unknown."""
        return self._learn and self._copied < TRIES

    def copies_unused(self) -> None:
        """Move the correction of copies in order towards 1 after a step without any."""
        self._in_order.fade()

    def computed(self, device: int, rows: Iterable[int], nbytes: int, seconds: float) -> None:
        """Correct a processor's rate by the time that an expert group took.

        rows:    the number of tokens of each expert of the group
        nbytes:  the size of an expert
        seconds: the measured time of the group
        """
        if self._learn:
            self._processors[device].add(self._expected(device, rows, nbytes), seconds)

    def host_unused(self) -> None:
        """Move the host's correction towards 1 after a layer of which the host computed nothing."""
        self._processors[HOST].fade()
