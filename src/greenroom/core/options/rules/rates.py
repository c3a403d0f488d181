"""Rates of links and processors: a cost model, corrected by measurements during a run.

Seconds and bytes. The cost model is a machine's profile, or what was measured when the model was
loaded. Each link and processor has a correction: a moving average of measured over expected times.
The correction of the host's processor fades while it is not used: one slow moment must not rule it
out for good.
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


class Correction:
    """A correction of the cost model: a moving average of measured over expected times."""

    def __init__(self) -> None:
        self.value = 1.0

    def add(self, expected: float, seconds: float) -> None:
        """Add a measured time, and the expected one, to a correction of the cost model."""
        if expected > 0 and seconds > 0:
            ratio = min(max(seconds / expected, self.value / LIMIT), self.value * LIMIT)
            self.value = DECAY * self.value + (1 - DECAY) * ratio

    def fade(self) -> None:
        """Move a cost model's correction towards 1, at a step without a measurement."""
        self.value = 1 + FADE * (self.value - 1)


class Rates:
    """Expected times of links, devices and the host, corrected by measurements.

    The links are those from the store to host memory to devices.

    `costs.host` are the times of an expert of `expert_bytes` on the host; UsageError without them.
    `learn`: whether measurements correct the cost model.
    """

    def __init__(
        self, costs: Costs, expert_bytes: int, devices: int = 1, learn: bool = True
    ) -> None:
        self.set_costs(costs)
        self._bytes, self._learn = expert_bytes, learn
        self._links = [Correction() for _ in range(1 + devices)]
        self._processors = {device: Correction() for device in (HOST, *range(devices))}
        self._began: dict[tuple[int, int], float] = {}  # chunks on (link, lane)
        self._landed = [float("-inf")] * (1 + devices)  # when each link last delivered

    def set_costs(self, costs: Costs) -> None:
        """Replace the cost model of links and processors; measured corrections stay."""
        if costs.host is None or len(costs.links) != 2:
            raise UsageError(
                "co-compute divides misses between a device and the host's processor: it needs"
                " links from disk to host to device, and the measured speed of both processors"
            )
        self._costs, self._host = costs, costs.host

    # ---- expected times

    def link(self, link: int, nbytes: float) -> float:
        """Return the expected seconds of a transfer of bytes over a link.

        `nbytes` on a link; link 0 begins at the store.
        """
        return self._links[link].value * nbytes / self._costs.links[min(link, 1)].bandwidth

    def processor(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        """Return the seconds in which a processor is expected to compute an expert.

        Experts have `nbytes` each, with `rows` tokens.
        """
        return self._processors[device].value * self._expected(device, rows, nbytes)

    def miss(self, request: int, rows: int, nbytes: int, in_host: bool, device: int) -> Miss:
        """Describe a missing expert by its expected transfer and computation times.

        `rows` tokens for an expert of `nbytes`.
        """
        read = 0.0 if in_host else self.link(0, nbytes)
        on_device, on_host = (self.processor(p, (rows,), nbytes) for p in (device, HOST))
        return Miss(request, rows, read, self.link(1 + device, nbytes), on_device, on_host, device)

    def _expected(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        work = self._host if device == HOST else self._costs.expert
        return sum(work.seconds(n) for n in rows) * nbytes / self._bytes

    # ---- measurements

    def chunk_started(self, link: int, lane: int, now: float) -> None:
        """Note when a link began to transfer a chunk, to measure its rate."""
        self._began[link, lane] = now

    def chunk_landed(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """Correct a link's rate by the time that a chunk took.

        The time is since it began, or since the chunk before it.
        """
        since = max(self._began.pop((link, lane)), self._landed[link])
        self._landed[link] = now
        if self._learn:
            bandwidth = self._costs.links[min(link, 1)].bandwidth
            self._links[link].add(nbytes / bandwidth, now - since)

    def computed(self, device: int, rows: Iterable[int], nbytes: int, seconds: float) -> None:
        """Correct a processor's rate by the time that a group of experts took.

        It was computed in `seconds`.
        """
        if self._learn:
            self._processors[device].add(self._expected(device, rows, nbytes), seconds)

    def host_unused(self) -> None:
        """Fade the correction of the host's rate after a step without host computation."""
        self._processors[HOST].fade()
