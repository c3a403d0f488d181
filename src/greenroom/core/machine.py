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

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.core.cost import Costs, Link, Work
from greenroom.errors import ProfileError, UnknownName, UsageError
from greenroom.json_file import (
    JsonObject,
    Malformed,
    integer,
    list_of,
    number,
    read_json,
    show_value,
)

FORMAT, VERSION = "greenroom-machine", 1
MOST_LANES = 1024  # of a link: transfers at a time
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
        if (version := found.value("version", None)) != VERSION:
            raise ProfileError(
                f"{path} is a machine profile of version {show_value(version)}, this Greenroom"
                f" reads version {VERSION}: measure again with greenroom doctor -o {path}"
            )
        try:
            return cls(
                found.list_of("links", _route),
                found.list_of("processors", _processor),
                _host(found.object("host", {})),
                found.object("measured", {}).values,
            )._checked()
        except Malformed as error:
            raise ProfileError(f"{path} is damaged: {error}") from error

    def _checked(self) -> Machine:
        if not self.routes or not self.processors:
            raise Malformed("a machine has at least one link and one processor")
        return self


def _host(found: JsonObject) -> Mapping[str, Any]:
    """What is for people, of which these are computed with."""
    for name in ("memory_bytes", "available_bytes", "cores", "load"):
        found.number(name, 0)
    return found.values


def _route(value: Any, where: str) -> Route:
    entry = JsonObject(value, where)
    bandwidth = entry.number("bandwidth")
    if bandwidth == 0:
        raise Malformed(f"{where}.bandwidth must be more than 0")
    link = Link(
        bandwidth, entry.number("latency"), entry.integer("lanes", least=1, most=MOST_LANES)
    )
    return Route(entry.name("source"), entry.name("target"), link)


def _processor(value: Any, where: str) -> Processor:
    entry = JsonObject(value, where)
    return Processor(
        entry.name("name"), entry.name("memory"),
        _table(entry.object("expert"), where), _table(entry.object("dense"), where),
        **{name: entry.number(name, 0.0) for name in BEYOND},
    )  # fmt: skip


def name_of(host: Mapping[str, Any]) -> str:
    """What tells a machine from others: its processor, cores and memory (in GiB)."""
    memory = round(int(host.get("memory_bytes", 0)) / 2**30)
    return f"{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores, {memory} GiB"


def _table(entry: JsonObject, where: str) -> Table:
    nbytes, tokens = (entry.list_of(name, _from_1) for name in ("nbytes", "tokens"))
    seconds = entry.list_of("seconds", list_of(number))
    for name, values in (("nbytes", nbytes), ("tokens", tokens)):
        if not values or list(values) != sorted(set(values)):
            raise Malformed(f"{where}: {name} of a table must be ascending numbers from 1")
    if [len(row) for row in seconds] != [len(tokens)] * len(nbytes):
        raise Malformed(f"{where}: a table of times must have {len(nbytes)} rows of {len(tokens)}")
    return Table(nbytes, tokens, seconds)


def _from_1(value: Any, where: str) -> int:
    return integer(value, where, least=1)
