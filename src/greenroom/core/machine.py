"""Machine profiles: links between memories, and the processors that compute from them.

`greenroom doctor` measures a profile and `simulate --machine` takes it. The file is JSON:

    {"format": "greenroom-machine", "version": 1, "host": {...},
     "links": [{"source": "disk", "target": "host",
                "bandwidth": 1.6e9, "latency": 8e-5, "lanes": 2}],
     "processors": [{"name": "cpu", "memory": "host",
                     "expert": {"nbytes": [3145728], "tokens": [1, 16], "seconds": [[2e-4, 6e-4]]},
                     "dense": {...the same...}}]}

Bandwidths are in bytes a second, latencies and times in seconds. The objects `host` and `measured`
say which machine was measured, with how much memory, and how.
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
# Of a processor, besides its tables.
NUMBERS = (
    "layer", "fetch", "copy", "ahead", "wake", "hop", "miss", "graph_token", "graph_layer",
    "piece_layer", "shared_miss",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Measured computation times of a processor, by bytes of weights and tokens.

    `seconds[i][j]` is the time for `nbytes[i]` and `tokens[j]`; both lists are ascending.
    """

    nbytes: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, nbytes: int) -> Work:
        """Interpolate measured computation times for weights of a given size in bytes.

        Below the smallest and above the largest measured size, times are in proportion to the size.
        """
        if nbytes <= 0:
            return Work.constant(0.0)
        near = min(max(nbytes, self.nbytes[0]), self.nbytes[-1])
        columns = zip(*self.seconds, strict=True)
        times = [float(np.interp(near, self.nbytes, column)) * nbytes / near for column in columns]
        return Work(tuple(zip(self.tokens, times, strict=True)))

    def scaled(self, factor: float) -> Table:
        """Copy a table of measured times, with all times multiplied by a factor."""
        return replace(self, seconds=tuple(tuple(s * factor for s in row) for row in self.seconds))


@dataclass(frozen=True, slots=True)
class Route:
    """A link of a machine, with the names of its two memories."""

    source: str
    target: str
    link: Link


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor of a machine, which computes experts from slots in one memory.

    expert, dense: times of an expert and of a layer's dense weights, by bytes and tokens

    Further times of a running model, in seconds (0 if they were not measured):

    layer: other time of each layer of a pass (attention, norms, router, Python)
    ahead: additional time of each layer while a predictor of experts runs
    fetch: for each fetched expert
    copy:  for each byte of a fetched expert
    wake:  slowdown after a wait, per second of the wait (see `Costs`)
    hop:   for another device than the first in a layer
    miss:  for each layer that waits for missing experts
    shared_miss: the same, where the host's processor may compute some of them

    In place of `layer`, where the passes of single tokens are CUDA graphs (0 if they are not):

    graph_token, graph_layer: other time of each token, and of each layer, in one graph
    piece_layer: other time of each layer, with a graph for each layer
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
    hop: float = 0.0
    miss: float = 0.0
    graph_token: float = 0.0
    graph_layer: float = 0.0
    piece_layer: float = 0.0
    shared_miss: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: memories (disk, host, device), the links between them, and its processors.

    `host` and `measured` describe the machine and its measurement; they are copied from its
    profile.
    """

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
        """Return a model's transfer and computation costs on this machine.

        expert_bytes: the size of an expert
        dense_bytes:  the size of the dense weights of a layer
        processor:    the name of the processor that computes (default: the first one)
        store:        the name of the memory that holds all experts (default: the source of the
                      first link)

        UnknownName lists the valid names; UsageError if no links lead from `store` to the
        processor.
        """
        chosen = self.processor(processor)
        links = self.path(self.routes[0].source if store is None else store, chosen.memory)
        host = self._host_processor(chosen.memory)
        return Costs(
            links,
            chosen.expert.at(expert_bytes),
            chosen.dense.at(dense_bytes).plus(chosen.layer),
            chosen.fetch + chosen.copy * expert_bytes,
            chosen.ahead,
            host.expert.at(expert_bytes) if host is not None and len(links) > 1 else None,
            chosen.wake,
            chosen.hop,
            chosen.miss,
            shared_miss=chosen.shared_miss or chosen.miss,
        )

    def _host_processor(self, memory: str) -> Processor | None:
        """Find the processor of the memory from which `memory` is filled; None if there is none."""
        sources = [route.source for route in self.routes if route.target == memory]
        return next((p for p in self.processors if p.memory in sources), None)

    def processor(self, name: str | None = None) -> Processor:
        """Find a machine's processor by its name; without a name, the first processor.

        UnknownName lists the names of the machine's processors.
        """
        if name is None:
            return self.processors[0]
        named = {p.name: p for p in self.processors}
        if name not in named:
            raise UnknownName("processor", name, named)
        return named[name]

    def path(self, source: str, target: str) -> tuple[Link, ...]:
        """List the links from one of a machine's memories to another, in order.

        UnknownName if the machine has no memory `source`; UsageError if no links lead to `target`,
        or both are the same memory.
        """
        onward = {route.source: route for route in self.routes}
        places = {*onward, *(route.target for route in self.routes)}
        if source not in places:
            raise UnknownName("store", source, sorted(places))
        links: list[Link] = []
        place = source
        while place != target:
            if place not in onward or len(links) == len(onward):
                raise UsageError(
                    f"no link leads from {source} to {target} in the machine's profile:"
                    " choose another --store or --processor"
                )
            links.append(onward[place].link)
            place = onward[place].target
        if not links:
            raise UsageError(
                f"--store {source} is the memory of the processor itself, so no expert would be"
                " moved: choose another --store or --processor"
            )
        return tuple(links)

    def as_json(self) -> dict[str, Any]:
        """Return the content of a machine profile's JSON file."""
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
        """Read a machine profile from a JSON file, as `greenroom doctor` writes it.

        ProfileError if the file cannot be read, is damaged, or has another version.
        """
        profile = read_json(
            path, FORMAT, "is no machine profile", "greenroom doctor -o", ProfileError
        )
        if (version := profile.value("version", None)) != VERSION:
            raise ProfileError(
                f"{path} is a machine profile of version {show_value(version)}, this Greenroom"
                f" reads version {VERSION}: measure again with greenroom doctor -o {path}"
            )
        try:
            return cls(
                profile.list_of("links", _route),
                profile.list_of("processors", _processor),
                _host(profile.object("host", {})),
                profile.object("measured", {}).values,
            )._checked()
        except Malformed as error:
            raise ProfileError(f"{path} is damaged: {error}") from error

    def _checked(self) -> Machine:
        if not self.routes or not self.processors:
            raise Malformed("links and processors must have at least one entry each")
        return self


def _host(entry: JsonObject) -> Mapping[str, Any]:
    """Check the description of the host in a machine profile.

    Only the numbers that Greenroom uses are checked.
    """
    for name in ("memory_bytes", "available_bytes", "cores", "load"):
        entry.number(name, 0)
    return entry.values


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
        **{name: entry.number(name, 0.0) for name in NUMBERS},
    )  # fmt: skip


def machine_name(host: Mapping[str, Any]) -> str:
    """Return the name of a machine: its processor, cores and memory (in GiB)."""
    memory = round(int(host.get("memory_bytes", 0)) / 2**30)
    return f"{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores, {memory} GiB"


def _table(entry: JsonObject, where: str) -> Table:
    nbytes, tokens = (entry.list_of(name, _from_1) for name in ("nbytes", "tokens"))
    seconds = entry.list_of("seconds", list_of(number))
    for name, values in (("nbytes", nbytes), ("tokens", tokens)):
        if not values or list(values) != sorted(set(values)):
            raise Malformed(
                f"{where}: {name} must be a list of whole numbers of at least 1, each larger than"
                " the one before"
            )
    if [len(row) for row in seconds] != [len(tokens)] * len(nbytes):
        raise Malformed(
            f"{where}: seconds must have {len(nbytes)} rows, one for each of nbytes, of"
            f" {len(tokens)} numbers, one for each of tokens"
        )
    return Table(nbytes, tokens, seconds)


def _from_1(value: Any, where: str) -> int:
    return integer(value, where, least=1)
