"""Python API `greenroom.simulate`: compare eviction policies and cache capacities on a trace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from greenroom.config import SimulateConfig, check_keywords
from greenroom.core.machine import Machine
from greenroom.core.policy import Policy
from greenroom.errors import UnknownName, UsageError
from greenroom.policies import policy as named_policy
from greenroom.predictors import OFF
from greenroom.sim.study import Cell, Row, capacities, requested_predictors, split_names, study_of
from greenroom.sim.sweep import sweep
from greenroom.sim.table import html_table, rows_text, table_of, trace_heading
from greenroom.trace import Trace, load


class Simulation(Sequence[Row]):
    """Results of a simulation: one dict for each policy, predictor and capacity.

    The object is a sequence of dicts, as in `results[0]["miss_ratio"]`, and prints as a table. The
    dicts have the fields of `greenroom simulate --json` (docs/simulate.md). `greenroom.study.table`
    makes an Arrow table of them.
    """

    def __init__(self, trace: Trace, rows: Sequence[Row]) -> None:
        """Store the results (`rows`) of a simulation of a trace."""
        self.trace, self.experts, self._rows = trace, int(trace.offsets[-1]), tuple(rows)
        self._heading = trace_heading(trace, rows[0])

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
        """Return curves to plot, by name of the policy (and predictor).

        A curve is (capacities in ascending order, values of `field`). Raises UnknownName if the
        results have no such field.
        """
        if field not in self._rows[0]:
            raise UnknownName("field", field, self._rows[0])
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for row in sorted(self._rows, key=lambda row: int(row["capacity"])):
            prefetch = row.get("prefetch", OFF)
            name = row["policy"] if prefetch == OFF else f"{row['policy']}, {prefetch}"
            sizes, values = curves.setdefault(name, ([], []))
            sizes.append(int(row["capacity"]))
            values.append(row[field])
        return curves

    def __repr__(self) -> str:
        return rows_text(self._heading, *table_of(self._rows, self.experts))

    def _repr_html_(self) -> str:
        """Show the table of simulation results in a notebook."""
        return html_table(*table_of(self._rows, self.experts), caption=self._heading)


@check_keywords
def simulate(
    trace: str | os.PathLike[str] | Trace,
    policy: str | Policy | Sequence[str | Policy] = "auto",
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
    speculate: str = OFF,
    expert_bytes: int | None = None,
    dense_bytes: int | None = None,
    workers: int | None = None,
) -> Simulation:
    """Simulate expert caches on a trace: each eviction policy at each cache capacity.

        results = greenroom.simulate("run.trace", ["lru", "auto", "opt"], ["10%", "25%", "50%"])
        results[0]["miss_ratio"]               # `results` prints as a table
        results.curves()["lru"]                # ([capacities], [miss ratios])

    trace: a file (`greenroom trace record`, or a published npz), or a `greenroom.trace.Trace`
    policy: eviction policies: names (options follow a colon), files with a `policy`, or objects
    capacity: cache sizes in experts, or as shares of all experts: 64, "25%"
    order: the order of the accesses to experts: by token (natural, the default), by token and rank
        of the expert (rounds), or by forward pass (runtime, the default with a machine)
    scope: one cache for all layers (shared), one per layer (per-layer), "N,N,..." or a file
    pin: "step" protects the experts of the current step from eviction, "none" does not
    seed: seed of policies that draw random numbers
    limit: number of tokens to simulate, from the start of the trace
    reset: start every prompt with an empty cache
    machine: a machine profile (file of `greenroom doctor -o`, or a `Machine`); adds times
    prefetch: expert predictors to prefetch with (needs a machine); "off" is without prefetching
    speculate: "lookup" lets decode passes verify drafts (needs a machine, and token ids)
    expert_bytes, dense_bytes: bytes of an expert, and of a layer's other weights (with a machine;
        default: from the trace; other weights of unknown size take no time)
    workers: number of simulations to run at a time (default: one per core)

    docs/simulate.md describes further options of the command `greenroom simulate`. Raises
    TraceError, ProfileError, UnknownName or UsageError. Long simulations with prefetching run in
    new processes, so a script that calls this function needs `if __name__ == "__main__"`.
    """
    data = trace if isinstance(trace, Trace) else load(Path(trace))
    policies = _policies(policy)
    config = SimulateConfig(
        policy=",".join(policies), capacity=_join("capacity", capacity), order=order,
        scope=scope, pin=pin, seed=seed, limit=limit, reset=reset,
        machine=None if machine is None else str(machine),
        prefetch=None if prefetch == OFF else _join("prefetch", prefetch), speculate=speculate,
        expert_bytes=None if expert_bytes is None else str(expert_bytes),
        dense_bytes=None if dense_bytes is None else str(dense_bytes),
    )  # fmt: skip
    if machine is not None and not isinstance(machine, Machine):
        machine = Machine.load(Path(machine))
    return _simulate(
        data if limit is None else data.head(limit), policies.values(), config, machine, workers
    )


def _simulate(
    trace: Trace,
    policies: Iterable[str | Policy],
    config: SimulateConfig,
    machine: Machine | None,
    workers: int | None,
) -> Simulation:
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}: it must be at least 1")
    slots, ahead = (
        capacities(config.capacity, int(trace.offsets[-1])),
        requested_predictors(config, trace),
    )
    cells = [
        Cell(each, size, config.pin, prefetch)
        for each in policies
        for prefetch in ahead
        for size in slots
    ]
    return Simulation(trace, sweep(study_of(config, trace, machine), cells, workers=workers))


def _policies(requested: str | Policy | Sequence[str | Policy]) -> dict[str, str | Policy]:
    """Return the policies of a simulation by name; raises UsageError for two of one name."""
    items = [requested] if isinstance(requested, str | Policy) else list(requested)
    if not items:
        raise UsageError("policy is an empty list: give at least one policy")
    policies: dict[str, str | Policy] = {}
    for item in items:
        for each in split_names(item) if isinstance(item, str) else [item]:
            name = each if isinstance(each, str) else each.name
            if policies.setdefault(name, each) is not each and not isinstance(each, str):
                raise UsageError(f"two policies are called {name}: give one of them another name")
            if isinstance(each, str):
                named_policy(each)
    return policies


def _join(what: str, value: str | int | Sequence[str | int]) -> str:
    """Join an option's values by commas, as on the command line."""
    if not isinstance(value, str | int) and not value:
        raise UsageError(f"{what} is an empty list: give at least one {what}")
    return str(value) if isinstance(value, str | int) else ",".join(map(str, value))
