"""Inputs of a simulation sweep, and the simulation of one policy, capacity and predictor.

Without costs a cell is a replay, with costs its steps are timed too (`timed.py`). Where the time of
transfers decides which experts are resident, it is simulated event by event (`event_driven.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from greenroom.config import (
    PINS,
    Amount,
    BudgetsConfig,
    SimulateConfig,
    scope_of,
    split_of,
)
from greenroom.core.cache.pins import Pins
from greenroom.core.cache.scope import name_of
from greenroom.core.cost import Costs
from greenroom.core.home_devices import home_devices
from greenroom.core.machine import Machine
from greenroom.core.stream import Stream
from greenroom.errors import UsageError
from greenroom.policies import policy
from greenroom.predictors import OFF
from greenroom.sim.approximation import check_weights
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.sim.foresight import check_predictors
from greenroom.sim.pinned import pinned_by_step
from greenroom.sim.replay import ReplayResult, replay
from greenroom.sim.timed import SimulatedTimes, time_trace
from greenroom.trace import Trace, stream

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a simulation sweep: a policy, a capacity in slots, a predictor or `off`."""

    policy: str
    capacity: int
    pin: str = "step"
    prefetch: str = OFF


@dataclass(frozen=True, slots=True)
class Study(EventOptions):
    """Trace and options that all cells of a simulation sweep share.

    Prefetching needs costs, and the order `runtime`.
    """

    trace: Trace
    requests: Stream
    order: str
    costs: Costs | None = None
    expert_bytes: int = 0
    pins: Pins | None = None  # pinned experts of tasks; without costs, in order `runtime`

    @classmethod
    def of(cls, trace: Trace, order: str, **options: Any) -> Study:
        """Put a trace's requests in an order; UnknownName for another order."""
        return cls(trace, stream(trace, order), order, **options)

    def run(self, cell: Cell) -> Row:
        """Simulate one cell of a sweep; return its row, as `--json` prints it."""
        chosen = policy(cell.policy)
        options: Any = {
            "scope": self.scope, "pin": cell.pin, "seed": self.seed, "reset": self.reset,
        }  # fmt: skip
        result: ReplayResult | SimulatedTimes
        timed: dict[str, Any] = {}
        if self.costs is None:
            pinned = pinned_by_step(self.trace, self.requests, self.pins) if self.pins else ()
            result = replay(
                self.requests, self.trace.offsets, cell.capacity, chosen, pinned=pinned, **options
            )  # fmt: skip
        elif not self._needs_events(cell):
            result = time_trace(
                self.trace, self.requests, cell.capacity, chosen, self.costs, self.expert_bytes,
                **options,
            )  # fmt: skip
            timed = {"prefetch": OFF, **result.as_json()}
        else:
            if cell.pin != "step":
                raise UsageError(
                    "prefetching, splits, approximated misses, a host tier and several devices need"
                    " the experts of a step to be protected: leave out --pin, or give --pin step"
                )
            simulated = simulate_events(
                self.trace, self.requests, cell.capacity, chosen, self.costs, self.expert_bytes,
                cell.prefetch, self,
            )  # fmt: skip
            result, timed = simulated.times, {"prefetch": cell.prefetch, **simulated.as_json()}
        return {
            "policy": chosen.name,
            "order": self.order,
            "scope": name_of(self.scope),
            "pin": cell.pin,
            "capacity": cell.capacity,
            "requests": result.requests,
            "misses": result.misses,
            "miss_ratio": result.misses / result.requests if result.requests else 0.0,
            **timed,
        }

    @property
    def needs_events(self) -> bool:
        """Check that all cells need event-driven simulation, with policies that know no future."""
        parts = self.split is not None or self.approximation is not None
        return self.host > 0 or self.devices > 1 or parts or self.config.proposes()

    def _needs_events(self, cell: Cell) -> bool:
        """Check that a cell of a sweep needs event-driven simulation."""
        return cell.prefetch != OFF or self.needs_events

    def warm(self, cell: Cell) -> None:
        """Compile the code that a sweep's cell needs, by simulating a few steps.

        Two threads that compile the same function at once would both do it, and compiling holds
        the GIL: so all code is compiled before the threads start.
        """
        head = self.trace.head(2)
        with suppress(UsageError):  # the cell itself reports its errors
            replace(self, trace=head, requests=stream(head, self.order), pins=None).run(cell)


def capacities(text: str, experts: int) -> list[int]:
    """Parse cache capacities such as `64,25%`: slots, or shares of all experts rounded down.

    UsageError for an impossible capacity.
    """
    return [_capacity(item.strip(), experts) for item in text.split(",")]


def _capacity(text: str, experts: int) -> int:
    try:
        amount = Fraction(text[:-1].strip()) if text.endswith("%") else int(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"--capacity {text!r}: write a number of slots such as 64, or a share such as 25%"
        ) from error
    if isinstance(amount, int):
        if not 1 <= amount <= experts:
            raise UsageError(f"--capacity {amount}: must be from 1 to all {experts} experts")
        return amount
    if not 0 < amount <= 100:
        raise UsageError(f"--capacity {text}: a share is above 0% and at most 100%")
    if amount * experts < 100:
        raise UsageError(f"--capacity {text}: of {experts} experts that is less than one")
    return int(amount * experts / 100)


def split_names(text: str) -> list[str]:
    """Split a list of policies or predictors at commas, and keep options with their name.

    In `lru,moe-infinity:matching=request,capacity=50,opt` the second name has two options.
    """
    result: list[str] = []
    for item in text.split(","):
        if result and ":" in result[-1] and "=" in item and ":" not in item:
            result[-1] += f",{item.strip()}"
        else:
            result.append(item.strip())
    return result


def curve_capacities(requested: Sequence[int], experts: int, least: int) -> Iterator[int]:
    """Yield the cache capacities of a curve: the requested ones and twelve more.

    The largest has room for all experts.
    """
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    points = {int(share * experts) for share in shares} | set(requested)
    yield from sorted(point for point in points if point >= least)


def study_of(config: SimulateConfig, trace: Trace, machine: Machine | None) -> Study:
    """Build a sweep's shared inputs from a configuration; UsageError for unfit options."""
    if config.approximation() is not None:
        check_weights(trace)
    pins = None if config.pin in PINS else Pins.load(config.pin, trace.offsets.tolist())
    return Study.of(
        trace, config.replayed, scope=scope_of(config.scope), seed=config.seed, reset=config.reset,
        ahead=config.ahead, pins=pins, split=split_of(config.split), config=config,
        nested=config.nested, **machine_options(config, trace, machine),
    )  # fmt: skip


def requested_predictors(config: SimulateConfig, trace: Trace) -> list[str]:
    """Resolve the requested predictors, and check that the trace has their data."""
    return check_predictors(trace, split_names(config.prefetch or OFF), config.seed)


def machine_options(
    config: SimulateConfig, trace: Trace, machine: Machine | None
) -> dict[str, Any]:
    """Return a sweep's costs and sizes for a machine; none without a machine."""
    if machine is None:
        return {}
    costs, expert = costs_of(config, trace, machine, processor=config.processor, store=config.store)
    home_devices(trace.offsets.tolist(), config.devices)  # only checks: UsageError
    check_co_compute(config, costs)
    return {
        "costs": costs,
        "expert_bytes": expert,
        "host": host_slots(config, trace, costs),
        "devices": config.devices,
    }


def costs_of(
    config: SimulateConfig | BudgetsConfig, trace: Trace, machine: Machine, **places: str | None
) -> tuple[Costs, int]:
    """Return (costs of a machine, bytes of an expert); UsageError for an unknown size."""
    expert = size_of(config.expert_bytes, trace, "expert_bytes")
    if not expert:
        raise UsageError(
            "the trace does not say how large an expert is: give --expert-bytes, such as 12MiB"
        )
    dense = size_of(config.dense_bytes, trace, "dense_bytes")
    return machine.costs(expert, dense, **places), expert


def check_co_compute(config: SimulateConfig, costs: Costs) -> None:
    """Check that `--co-compute` has host memory and a second processor; else UsageError."""
    if not config.uses_host():
        return
    if config.host_capacity is None:
        raise UsageError(
            "--co-compute auto computes experts that are in host memory: give --host-capacity"
        )
    if costs.host is None:
        raise UsageError(
            "--co-compute auto needs two processors, one beside host memory and one behind it"
            " (--processor): this machine's profile has no such pair"
        )


def host_slots(config: SimulateConfig, trace: Trace, costs: Costs) -> int:
    """Return the cache slots in host memory; UsageError unless there are two links."""
    if config.host_capacity is None:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-capacity is of host memory between two links, disk to host to device; the way"
            f" to this --processor has {len(costs.links)}"
        )
    slots = capacities(config.host_capacity, int(trace.offsets[-1]))
    if len(slots) != 1:
        raise UsageError(f"--host-capacity must be one number, got {config.host_capacity}")
    return slots[0]


def size_of(option: str | None, trace: Trace, name: str) -> int:
    """Return a size in bytes: from an option, else from the trace, else 0."""
    if option is not None:
        return 0 if option.strip() == "0" else Amount.parse(option, name).of(0)
    size = trace.meta.get(name)
    return int(size) if isinstance(size, int | float) and size > 0 else 0
