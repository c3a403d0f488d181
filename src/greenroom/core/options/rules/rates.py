"""How long a piece takes on each link and processor: what is known beforehand, corrected by what is
seen while it runs. Seconds and bytes.

Beforehand it is a cost model: a machine's profile, or what was measured when the model was loaded.
Each link and processor has a correction, a moving average of seen over expected. That of the host's
processor fades while it is not used: one bad moment must not rule it out for good.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.cost import Costs
from greenroom.core.events import HOST
from greenroom.core.options.rules.processors import Miss
from greenroom.errors import UsageError

KEEP = 0.9  # what a correction keeps at each sample: about the last ten count
LEAP = 4.0  # times the correction: a sample beyond that counts as that, a hiccup is no rule
FADE = 0.99  # what is left of a correction at each step that does not use the processor


class Correction:
    """Seen over expected, averaged."""

    def __init__(self) -> None:
        self.value = 1.0

    def saw(self, expected: float, seconds: float) -> None:
        """Something took `seconds`."""
        if expected > 0 and seconds > 0:
            ratio = min(max(seconds / expected, self.value / LEAP), self.value * LEAP)
            self.value = KEEP * self.value + (1 - KEEP) * ratio

    def fade(self) -> None:
        """Nothing was seen: it may be what was known beforehand again."""
        self.value = 1 + FADE * (self.value - 1)


class Rates:
    """Of a chain of two links, from the store to host memory to each of several devices, the
    devices, and the host's processor.

    `costs.host` says what an expert of `expert_bytes` takes there; UsageError without it. Where it
    does not `learn`, what was known beforehand stays.
    """

    def __init__(
        self, costs: Costs, expert_bytes: int, devices: int = 1, learn: bool = True
    ) -> None:
        self.known(costs)
        self._bytes, self._learn = expert_bytes, learn
        self._links = [Correction() for _ in range(1 + devices)]
        self._processors = {device: Correction() for device in (HOST, *range(devices))}
        self._began: dict[tuple[int, int], float] = {}  # chunks on (link, lane)
        self._landed = [float("-inf")] * (1 + devices)  # when each link last delivered

    def known(self, costs: Costs) -> None:
        """Another cost model is known beforehand, from here on; corrections are of what is."""
        if costs.host is None or len(costs.links) != 2:
            raise UsageError(
                "co-compute shares misses out between a device and the host's processor: it needs a"
                " way from disk to host to device, and the speed of both"
            )
        self._costs, self._host = costs, costs.host

    # ---- what something takes

    def link(self, link: int, nbytes: float) -> float:
        """Seconds that a link is busy with so many bytes; 0 is the one from the store."""
        known = self._costs.links[min(link, 1)]
        return self._links[link].value * nbytes / known.bandwidth

    def processor(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        """Seconds for experts of so many bytes, each with so many tokens."""
        return self._processors[device].value * self._expected(device, rows, nbytes)

    def miss(self, request: int, rows: int, nbytes: int, kept: bool, device: int) -> Miss:
        """A request of so many tokens for an expert of so many bytes, in host memory or not."""
        read = 0.0 if kept else self.link(0, nbytes)
        there, here = (self.processor(p, (rows,), nbytes) for p in (device, HOST))
        return Miss(request, rows, read, self.link(1 + device, nbytes), there, here, device)

    def _expected(self, device: int, rows: Iterable[int], nbytes: int) -> float:
        work = self._host if device == HOST else self._costs.expert
        return sum(work.seconds(n) for n in rows) * nbytes / self._bytes

    # ---- what is seen

    def starts(self, link: int, lane: int, now: float) -> None:
        """A lane gets a chunk."""
        self._began[link, lane] = now

    def lands(self, link: int, lane: int, nbytes: float, now: float) -> None:
        """A lane has delivered its chunk: since it began, or since the chunk before it."""
        since = max(self._began.pop((link, lane)), self._landed[link])
        self._landed[link] = now
        if self._learn:
            known = self._costs.links[min(link, 1)]
            self._links[link].saw(nbytes / known.bandwidth, now - since)

    def computed(self, device: int, rows: Iterable[int], nbytes: int, seconds: float) -> None:
        """A wave of these experts took so long."""
        if self._learn:
            self._processors[device].saw(self._expected(device, rows, nbytes), seconds)

    def unused(self) -> None:
        """A step leaves nothing to the host's processor."""
        self._processors[HOST].fade()
