"""A machine's profile: links between places where experts can be, and processors beside them.

`greenroom doctor` measures one and `simulate --machine` takes it. The file is JSON:

    {"format": "greenroom-machine", "version": 1, "host": {...},
     "links": [{"source": "disk", "target": "host",
                "bandwidth": 1.6e9, "latency": 8e-5, "lanes": 2}],
     "processors": [{"name": "cpu", "memory": "host",
                     "expert": {"nbytes": [3145728], "tokens": [1, 16], "seconds": [[2e-4, 6e-4]]},
                     "dense": {...the same...}}]}

Bandwidths are bytes a second, latencies and times seconds. What else is in it (`host`, `measured`)
is for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import ProfileError, UnknownName, UsageError
from greenroom.json_file import read_json

FORMAT, VERSION = "greenroom-machine", 1
BEYOND = ("layer", "fetch", "copy", "ahead", "wake")  # of a processor, beside its tables


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times: seconds[i][j] for weights of nbytes[i] and tokens[j], both ascending."""

    nbytes: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, nbytes: int) -> Work:
        """For weights of another size: between two sizes on a line, beyond them in proportion."""
        if nbytes <= 0:
            return Work.constant(0.0)
        near = min(max(nbytes, self.nbytes[0]), self.nbytes[-1])
        columns = zip(*self.seconds, strict=True)
        times = [float(np.interp(near, self.nbytes, column)) * nbytes / near for column in columns]
        return Work(tuple(zip(self.tokens, times, strict=True)))

    def scaled(self, factor: float) -> Table:
        """So many times as long, for every size and number of tokens."""
        return replace(self, seconds=tuple(tuple(s * factor for s in row) for row in self.seconds))


@dataclass(frozen=True, slots=True)
class Route:
    """A link from one place to the next."""

    source: str
    target: str
    link: Link


@dataclass(frozen=True, slots=True)
class Processor:
    """Computes from the slots in `memory`: experts, and the dense layers, by size and tokens.

    What a model that runs takes beyond its matrices: `layer` seconds for each layer of a pass
    (attention, norms, router, Python), `ahead` seconds more while a predictor runs, `fetch` seconds
    for each expert that comes and `copy` seconds for each byte of it; `wake` seconds more for each
    second of a wait before (see `Costs`). They are 0 in a profile that knows nothing of them.
    """

    name: str
    memory: str
    expert: Table
    dense: Table
    layer: float = 0.0
    fetch: float = 0.0
    copy: float = 0.0
    ahead: float = 0.0
    wake: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Places (disk, host, device), the links between them, and who computes where."""

    routes: tuple[Route, ...]
    processors: tuple[Processor, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def costs(
        self,
        expert_bytes: int,
        dense_bytes: int = 0,
        *,
        processor: str | None = None,
        store: str | None = None,
    ) -> Costs:
        """The costs of a model with experts, and dense weights a layer, of so many bytes.

        `processor` computes (default: the first), `store` is where the experts wait (default: the
        first link's source). UnknownName lists the names; UsageError where no links join the two.
        """
        chosen = self.processor(processor)
        links = self.path(self.routes[0].source if store is None else store, chosen.memory)
        beside = self._beside(chosen.memory)
        return Costs(
            links,
            chosen.expert.at(expert_bytes),
            chosen.dense.at(dense_bytes).later(chosen.layer),
            chosen.fetch + chosen.copy * expert_bytes,
            chosen.ahead,
            beside.expert.at(expert_bytes) if beside is not None and len(links) > 1 else None,
            chosen.wake,
        )

    def _beside(self, memory: str) -> Processor | None:
        """Who computes in the place from which a memory is filled."""
        before = [route.source for route in self.routes if route.target == memory]
        return next((p for p in self.processors if p.memory in before), None)

    def processor(self, name: str | None = None) -> Processor:
        """By name; the first without one."""
        if name is None:
            return self.processors[0]
        named = {p.name: p for p in self.processors}
        if name not in named:
            raise UnknownName("processor", name, named)
        return named[name]

    def path(self, source: str, target: str) -> tuple[Link, ...]:
        """The links from one place to another, in order. A place has at most one link onward."""
        onward = {route.source: route for route in self.routes}
        places = {*onward, *(route.target for route in self.routes)}
        if source not in places:
            raise UnknownName("store", source, sorted(places))
        links: list[Link] = []
        place = source
        while place != target:
            if place not in onward or len(links) == len(onward):
                raise UsageError(f"no link leads from {source} to {target} on this machine")
            links.append(onward[place].link)
            place = onward[place].target
        if not links:
            raise UsageError(f"experts in {source} are in the slots' own memory: nothing to move")
        return tuple(links)

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "host": dict(self.host),
            "links": [
                {"source": r.source, "target": r.target, **asdict(r.link)} for r in self.routes
            ],
            "processors": [asdict(p) for p in self.processors],
            "measured": dict(self.measured),
        }

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a profile. ProfileError says what is wrong with it."""
        found = read_json(
            path, FORMAT, "is no machine profile", "greenroom doctor -o", ProfileError
        )
        if found.get("version") != VERSION:
            raise ProfileError(
                f"{path} is a machine profile of version {found.get('version')!r}, this Greenroom"
                f" reads version {VERSION}: measure again with greenroom doctor -o {path}"
            )
        try:
            return cls(
                tuple(_route(entry) for entry in found["links"]),
                tuple(_processor(entry) for entry in found["processors"]),
                found.get("host", {}),
                found.get("measured", {}),
            )._checked()
        except KeyError as error:
            raise ProfileError(f"{path} is damaged: {error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"{path} is damaged: {error}") from error

    def _checked(self) -> Machine:
        if not self.routes or not self.processors:
            raise ValueError("a machine has at least one link and one processor")
        return self


def _route(entry: Mapping[str, Any]) -> Route:
    lanes = entry["lanes"]
    if not isinstance(lanes, int) or lanes < 1:
        raise ValueError(f"lanes must be a whole number from 1, got {lanes!r}")
    bandwidth = _number(entry["bandwidth"], "bandwidth")
    if bandwidth == 0:
        raise ValueError("bandwidth must be more than 0")
    link = Link(bandwidth, _number(entry["latency"], "latency"), lanes)
    return Route(str(entry["source"]), str(entry["target"]), link)


def _processor(entry: Mapping[str, Any]) -> Processor:
    beyond = {name: _number(entry.get(name, 0.0), name) for name in BEYOND}
    return Processor(
        str(entry["name"]), str(entry["memory"]), _table(entry["expert"]), _table(entry["dense"]),
        **beyond,
    )  # fmt: skip


def name_of(host: Mapping[str, Any]) -> str:
    """What tells a machine from others: its processor, cores and memory (in GiB)."""
    memory = round(int(host.get("memory_bytes", 0)) / 2**30)
    return f"{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores, {memory} GiB"


def _table(entry: Mapping[str, Any]) -> Table:
    nbytes, tokens = tuple(map(int, entry["nbytes"])), tuple(map(int, entry["tokens"]))
    seconds = tuple(tuple(_number(s, "a time") for s in row) for row in entry["seconds"])
    for name, values in (("nbytes", nbytes), ("tokens", tokens)):
        if not values or values[0] < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"{name} of a table must be ascending numbers from 1")
    if [len(row) for row in seconds] != [len(tokens)] * len(nbytes):
        raise ValueError(f"a table of times must have {len(nbytes)} rows of {len(tokens)}")
    return Table(nbytes, tokens, seconds)


def _number(value: Any, what: str) -> float:
    """A number of seconds or bytes a second; JSON also lets through what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} must be a number from 0, got {value!r}")
    return float(value)
