"""`greenroom.simulate`: policies and capacities compared on a trace, from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from greenroom.config import options_checked, scope_of
from greenroom.core.machine import Machine
from greenroom.errors import UnknownName, UsageError
from greenroom.policies import policy as named_policy
from greenroom.predictors import OFF
from greenroom.sim.foresight import tried
from greenroom.sim.study import Cell, Row, Study, capacities, names, stored_bytes
from greenroom.sim.sweep import sweep
from greenroom.sim.table import heading, html_table, table_of, text
from greenroom.trace import ORDERS, Trace, load

PINS = ("step", "none")


class Simulation(Sequence[Row]):
    """The results of a simulation: a dict for each policy, prefetch and capacity, in that order.

    It is a sequence (`found[0]["miss_ratio"]`, `pandas.DataFrame(list(found))`), and shows itself
    as a table. Fields are those of `greenroom simulate --json` (docs/simulate.md).
    """

    def __init__(self, trace: Trace, rows: Sequence[Row]) -> None:
        """Of a trace, of which only the size is kept."""
        self._rows, self._experts = tuple(rows), int(trace.offsets[-1])
        self._heading = heading(trace, rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def curves(self, field: str = "miss_ratio") -> dict[str, tuple[list[int], list[float]]]:
        """For each policy (and predictor) its capacities and a field at each, ready to plot.

        UnknownName for a field that the rows have not.
        """
        if field not in self._rows[0]:
            raise UnknownName("field", field, self._rows[0])
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in sorted(self._rows, key=lambda row: int(row["capacity"])):
            prefetch = row.get("prefetch", OFF)
            name = row["policy"] if prefetch == OFF else f"{row['policy']}, {prefetch}"
            sizes, values = found.setdefault(name, ([], []))
            sizes.append(int(row["capacity"]))
            values.append(row[field])
        return found

    def __repr__(self) -> str:
        return text(self._heading, *table_of(self._rows, self._experts))

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(*table_of(self._rows, self._experts), caption=self._heading)


@options_checked
def simulate(
    trace: str | os.PathLike[str] | Trace,
    policy: str | Sequence[str] = "auto",
    capacity: str | int | Sequence[str | int] = "25%",
    *,
    order: str | None = None,
    scope: str = "shared",
    pin: str = "step",
    seed: int = 0,
    limit: int | None = None,
    reset: bool = False,
    machine: str | os.PathLike[str] | Machine | None = None,
    prefetch: str | Sequence[str] = OFF,
    expert_bytes: int | None = None,
    dense_bytes: int | None = None,
    workers: int | None = None,
) -> Simulation:
    """Replay a trace against every one of some policies at every one of some capacities.

        found = greenroom.simulate("run.trace", ["lru", "auto", "opt"], ["10%", "25%", "50%"])
        found                                  # a table
        found[0]["miss_ratio"]
        found.curves()["lru"]                  # ([capacities], [miss ratios])

    trace: a file (`greenroom trace record`, or a published npz), or a `greenroom.trace.Trace`
    policy: names, of which options follow a colon: "moe-infinity:matching=request"
    capacity: slots, or shares of all experts: 64, "25%"
    order: of the requests: natural (default), rounds, or runtime (default with a machine)
    scope: one cache for all layers (shared), one a layer (per-layer), "N,N,..." or a file
    pin: are the experts of a step safe while it is served? step, or none
    seed: of policies that draw lots
    limit: only the trace's first tokens
    reset: begin every request with an empty cache
    machine: a profile (`greenroom doctor -o`), or a `Machine`: adds times to the rows
    prefetch: with a machine, predictors that fetch ahead; "off" is the run without
    expert_bytes, dense_bytes: sizes of an expert and of a layer's other weights, with a machine
        (default: what the trace says; dense layers of unknown size take no time)
    workers: cells that run at a time (default: one a core)

    All that `greenroom simulate` can do beside is in docs/simulate.md. Raises TraceError,
    ProfileError, UnknownName or UsageError in one line. Long cells with prefetching run in new
    processes: a script that has them needs `if __name__ == "__main__"`.
    """
    data = trace if isinstance(trace, Trace) else load(Path(trace))
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1 token, got {limit}")
    data = data if limit is None else data.head(limit)
    order = order or ("natural" if machine is None else "runtime")
    _check(order, pin, machine is not None, prefetch, workers)
    cells = _cells(data, policy, capacity, prefetch, pin, seed)
    timing = _timing(data, machine, expert_bytes, dense_bytes)
    study = Study.of(data, order, scope=scope_of(scope), seed=seed, reset=reset, **timing)
    return Simulation(data, sweep(study, cells, workers=workers))


def _cells(
    trace: Trace,
    policy: str | Sequence[str],
    capacity: str | int | Sequence[str | int],
    prefetch: str | Sequence[str],
    pin: str,
    seed: int,
) -> list[Cell]:
    """Every policy with every predictor at every capacity; each name is tried on the trace."""
    policies = _listed("policy", policy)
    for name in policies:
        named_policy(name)
    slots = [
        size
        for each in ([capacity] if isinstance(capacity, str | int) else capacity)
        for size in capacities(str(each), int(trace.offsets[-1]))
    ]
    if not slots:
        raise UsageError("capacity is an empty list: give slots as 64, or a share as 25%")
    predictors = tried(trace, _listed("prefetch", prefetch), seed)
    return [Cell(p, size, pin, ahead) for p in policies for ahead in predictors for size in slots]


def _listed(what: str, given: str | Sequence[str]) -> list[str]:
    """Names, given as `a,b` or as a list."""
    found = names(given) if isinstance(given, str) else list(given)
    if not found:
        raise UsageError(f"{what} is an empty list: give a name")
    return list(dict.fromkeys(found))


def _check(
    order: str, pin: str, timed: bool, prefetch: str | Sequence[str], workers: int | None
) -> None:
    if order not in ORDERS:
        raise UnknownName("order", order, ORDERS)
    if pin not in PINS:
        raise UnknownName("pin", pin, PINS)
    if timed and order != "runtime":
        raise UsageError("a machine times real passes: leave out order, or give order='runtime'")
    if not timed and prefetch != OFF:
        raise UsageError("prefetching is a matter of time: give a machine too")
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}")


def _timing(
    trace: Trace,
    machine: str | os.PathLike[str] | Machine | None,
    expert_bytes: int | None,
    dense_bytes: int | None,
) -> dict[str, Any]:
    """An expert's size and what everything costs, as options of a study; none without a machine."""
    if machine is None:
        if expert_bytes is not None or dense_bytes is not None:
            raise UsageError("expert_bytes and dense_bytes are of use with a machine only")
        return {}
    found = machine if isinstance(machine, Machine) else Machine.load(Path(machine))
    expert = _nbytes(trace, "expert_bytes", expert_bytes)
    if not expert:
        raise UsageError("the trace does not say how large an expert is: give expert_bytes")
    costs = found.costs(expert, _nbytes(trace, "dense_bytes", dense_bytes))
    return {"costs": costs, "expert_bytes": expert}


def _nbytes(trace: Trace, name: str, given: int | None) -> int:
    """A size as it was given, else as the trace has it, else 0."""
    if given is not None and given < 0:
        raise UsageError(f"{name} must be a number of bytes, got {given}")
    return stored_bytes(trace, name) if given is None else given
