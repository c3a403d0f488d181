"""Inputs of a simulation sweep, and the simulation of one policy, capacity and predictor.

Without a machine's costs, only cache misses are counted (`replay.py`). With costs, times are
computed too (`timed.py`). If times decide which experts are in the cache, as with prefetching, the
simulation is event by event (`event_driven.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from greenroom.config import (
    LOOKUP,
    PINS,
    Amount,
    BudgetsConfig,
    SimulateConfig,
    scope_of,
    split_of,
)
from greenroom.core.cache.pins import Pins
from greenroom.core.cache.scope import name_of
from greenroom.core.config.base import AUTO, EXPERTS
from greenroom.core.cost import Costs
from greenroom.core.home_devices import home_devices
from greenroom.core.machine import Machine
from greenroom.core.policy import Policy
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
from greenroom.trace.speculate import speculate

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of options in a simulation sweep.

    policy:   the eviction policy, or its name
    capacity: size of the cache in experts
    pin:      "step" protects the experts of the current step from eviction, "none" does not
    prefetch: name of the expert predictor, or "off"
    """

    policy: str | Policy
    capacity: int
    pin: str = "step"
    prefetch: str = OFF

    @property
    def policy_name(self) -> str:
        """Return the name of the cell's eviction policy."""
        return self.policy if isinstance(self.policy, str) else self.policy.name

    @property
    def rule(self) -> Policy:
        return policy(self.policy) if isinstance(self.policy, str) else self.policy


@dataclass(frozen=True, slots=True)
class Study(EventOptions):
    """Trace and options that all simulations of a sweep share.

    trace:        the recorded trace
    requests:     the trace's expert requests in the given order
    order:        natural, rounds or runtime; prefetching needs runtime
    costs:        speeds of the simulated machine; None counts misses only, without prefetching
    expert_bytes: bytes of an expert
    pins:         experts of tasks that are never evicted; only without costs, in order runtime
    resizes:      (token, capacity): the cache has another size from that token on; without costs
    speculates:   whether decode passes verify drafts; needs costs
    """

    trace: Trace
    requests: Stream
    order: str
    costs: Costs | None = None
    expert_bytes: int = 0
    pins: Pins | None = None
    resizes: tuple[tuple[int, int], ...] = ()
    speculates: bool = False

    @classmethod
    def of(cls, trace: Trace, order: str, **options: Any) -> Study:
        """Build a study of a trace, with its requests in an order: natural, rounds or runtime.

        UnknownName for another order.
        """
        return cls(trace, stream(trace, order), order, **options)

    def run(self, cell: Cell) -> Row:
        """Simulate one combination of policy, capacity and predictor.

        Returns the results by field, as `greenroom simulate --json` prints them. Raises UsageError
        for options that exclude each other.
        """
        if self.speculates:
            return self._with_drafts(cell).run(cell)
        chosen = cell.rule
        result: ReplayResult | SimulatedTimes
        timed: dict[str, Any] = {}
        if self.costs is None:
            result = self.replay(cell)
        elif not self._needs_events(cell):
            result = time_trace(
                self.trace, self.requests, cell.capacity, chosen, self.costs, self.expert_bytes,
                scope=self.scope, pin=cell.pin, seed=self.seed, reset=self.reset,
            )  # fmt: skip
            timed = {"prefetch": OFF, **result.as_json()}
        else:
            if cell.pin != "step":
                raise UsageError(
                    f"--pin {cell.pin} does not work with prefetching, split experts,"
                    " approximation, host memory or several devices: leave out --pin, or give"
                    " --pin step"
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

    def replay(self, cell: Cell, **more: Any) -> ReplayResult:
        """Count the misses of one policy and capacity; `more` are further options of `replay`."""
        return replay(
            self.requests, self.trace.offsets, cell.capacity, cell.rule, scope=self.scope,
            pin=cell.pin, seed=self.seed, reset=self.reset, resizes=self.resized_steps(),
            pinned=pinned_by_step(self.trace, self.requests, self.pins) if self.pins else (),
            **more,
        )  # fmt: skip

    def resized_steps(self) -> list[tuple[int, int]]:
        """Return the steps from which the cache has another size, and these sizes."""
        tokens, sizes = [token for token, _ in self.resizes], [size for _, size in self.resizes]
        return list(
            zip(steps_of(self.trace, self.requests, self.order, tokens), sizes, strict=True)
        )

    def _with_drafts(self, cell: Cell) -> Study:
        """Return the study with the passes that verify drafts.

        Each token of a pass is expected to wait for experts as long as it does without drafts.
        """
        plain, trace, costs = replace(self, speculates=False), self.trace, self.costs
        assert costs is not None
        wait = float(plain.run(cell)["stall_s"]) / trace.tokens

        def seconds(tokens: int, experts: int) -> float:
            dense = trace.layers * costs.dense.seconds(tokens)
            return dense + experts * costs.expert.seconds(1) + tokens * wait

        trace = speculate(trace, seconds)
        return replace(plain, trace=trace, requests=stream(trace, self.order))

    @property
    def needs_events(self) -> bool:
        """Check whether all simulations must be event-driven, because of the shared options.

        Event-driven simulation excludes policies that must know the whole trace beforehand.
        """
        parts = self.split is not None or self.approximation is not None
        parts |= bool(self.tau) and self.divide is not None
        wide = self.host > 0 or self.devices > 1 or self.history is not None
        return wide or parts or self.config.proposes() or self.config.changes_times()

    def _needs_events(self, cell: Cell) -> bool:
        """Check whether one simulation of the sweep must be event-driven."""
        return cell.prefetch != OFF or self.needs_events

    def warm(self, cell: Cell) -> None:
        """Compile the code that a simulation needs, by simulating two tokens of the trace.

        Call this before simulations run in threads: two threads that need the same function at once
        would both compile it, under the GIL.
        """
        head = self.trace.head(2)
        with suppress(UsageError):  # the cell itself reports its errors
            requests = stream(head, self.order)
            study = replace(self, trace=head, requests=requests, pins=None, resizes=())
            replace(study, history=None).run(cell)


def capacities(text: str, experts: int, option: str = "--capacity") -> list[int]:
    """Parse cache capacities such as "64,25%": numbers or shares of all experts.

    Shares are rounded down. Raises UsageError for an impossible capacity; the message names
    `option`.
    """
    return [_capacity(item.strip(), experts, option) for item in text.split(",")]


def _capacity(text: str, experts: int, option: str) -> int:
    try:
        amount = Fraction(text[:-1].strip()) if text.endswith("%") else int(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"{option} {text!r}: give a number of experts such as 64, or a share such as 25%"
        ) from error
    if isinstance(amount, int):
        if not 1 <= amount <= experts:
            raise UsageError(
                f"{option} {amount}: must be from 1 to {experts}, the number of experts"
            )
        return amount
    if not 0 < amount <= 100:
        raise UsageError(f"{option} {text}: a share must be above 0% and at most 100%")
    if amount * experts < 100:
        raise UsageError(
            f"{option} {text}: this share of {experts} experts is less than one expert"
        )
    return int(amount * experts / 100)


def parse_resizes(text: str) -> list[tuple[int, str]]:
    """Parse a list of resizes, TOKEN:SIZE[,TOKEN:SIZE...]: (token, size as text), ascending.

    Raises UsageError for anything else.
    """
    resizes = []
    for item in text.split(","):
        token, colon, size = item.strip().partition(":")
        if not (colon and token.isdecimal() and size):
            raise UsageError(
                f"--resize {item.strip()!r}: give the number of a token and the size of the cache"
                " from there on, as 1000:12%"
            )
        resizes.append((int(token), size))
    tokens = [token for token, _ in resizes]
    if tokens != sorted(set(tokens)):
        raise UsageError(f"--resize {text}: give every token once, in ascending order")
    return resizes


def steps_of(trace: Trace, stream: Stream, order: str, tokens: Sequence[int]) -> list[int]:
    """Return the step of a replay with which each of some tokens begins.

    In order `runtime`, it is the first step of the forward pass that computes the token.
    """
    if order == "runtime":
        numbers = np.searchsorted(trace.pass_starts, tokens, side="right") - 1
    else:
        numbers = np.asarray(tokens)
    return [int(step) for step in np.searchsorted(stream.token, numbers)]


def split_names(text: str) -> list[str]:
    """Split a list of policies or predictors with options at commas.

    Commas between the options of one name do not separate names. For example,
    "lru,moe-infinity:matching=request,capacity=50,opt" has three names.
    """
    result: list[str] = []
    for item in text.split(","):
        if result and ":" in result[-1] and "=" in item and ":" not in item:
            result[-1] += f",{item.strip()}"
        else:
            result.append(item.strip())
    return result


def study_of(config: SimulateConfig, trace: Trace, machine: Machine | None) -> Study:
    """Build the inputs of a sweep from command-line options, a trace and a machine.

    Raises UsageError for options that do not fit the trace or the machine.
    """
    if config.approximation() is not None:
        check_weights(trace)
    pins = None if config.pin in PINS else Pins.load(config.pin, trace.offsets.tolist())
    experts = int(trace.offsets[-1])
    resizes = tuple(
        (token, _capacity(size, experts, "--resize"))
        for token, size in (parse_resizes(config.resize) if config.resize is not None else ())
    )
    if resizes and resizes[-1][0] >= trace.tokens:
        raise UsageError(
            f"--resize {config.resize}: the trace has only {trace.tokens} tokens, from 0 on"
        )
    return Study.of(
        trace, config.replayed, scope=scope_of(config.scope), seed=config.seed, reset=config.reset,
        ahead=config.ahead, pins=pins, resizes=resizes, split=split_of(config.split), config=config,
        nested=config.nested, speculates=config.speculate == LOOKUP,
        **machine_options(config, trace, machine),
    )  # fmt: skip


def requested_predictors(config: SimulateConfig, trace: Trace) -> list[str]:
    """Return the names in `--prefetch`, if the trace has the data that they need.

    `auto` is replaced by a concrete predictor. Raises UsageError if data is missing.
    """
    return check_predictors(trace, split_names(config.prefetch or OFF), config.seed)


def machine_options(
    config: SimulateConfig, trace: Trace, machine: Machine | None
) -> dict[str, Any]:
    """Return the options of a `Study` that follow from a machine; empty without a machine.

    Raises UsageError for options that the machine or the trace does not allow.
    """
    if machine is None:
        return {}
    costs, expert = costs_of(config, trace, machine, processor=config.processor, store=config.store)
    named = EXPERTS if config.device_placement == AUTO else config.device_placement
    home_devices(trace.offsets.tolist(), range(config.devices), named)  # only checks: UsageError
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
    """Return the speeds of a machine, and the bytes of an expert.

    `places` name the processor and the store, as `--processor` and `--store` do. Raises UsageError
    if neither the option nor the trace has the size of an expert.
    """
    expert = size_of(config.expert_bytes, trace, "expert_bytes")
    if not expert:
        raise UsageError(
            "the trace does not have the size of an expert: give --expert-bytes, such as 12MiB"
        )
    dense = size_of(config.dense_bytes, trace, "dense_bytes")
    return machine.costs(expert, dense, **places), expert


def check_co_compute(config: SimulateConfig, costs: Costs) -> None:
    """Raise UsageError if `--co-compute auto` lacks host memory or a second processor."""
    if not config.uses_host():
        return
    if config.host_capacity is None:
        raise UsageError("--co-compute auto needs experts in host memory: give --host-capacity")
    if costs.host is None:
        raise UsageError(
            "--co-compute auto needs a machine with a CPU at its host memory and a GPU: the profile"
            " of this machine does not have both, or --processor does not name the GPU"
        )


def host_slots(config: SimulateConfig, trace: Trace, costs: Costs) -> int:
    """Return the number of experts that `--host-capacity` caches in host memory, 0 without it.

    Raises UsageError unless experts move over two links, from disk to host memory to a device.
    """
    if config.host_capacity is None:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-capacity needs two links, disk to host memory and host memory to device: the"
            f" machine has {len(costs.links)} between the disk and this --processor"
        )
    slots = capacities(config.host_capacity, int(trace.offsets[-1]), "--host-capacity")
    if len(slots) != 1:
        raise UsageError(
            f"--host-capacity {config.host_capacity}: give one number or share, not several"
        )
    return slots[0]


def size_of(option: str | None, trace: Trace, name: str) -> int:
    """Return a size in bytes: from a command-line option, else from the trace, else 0."""
    if option is not None:
        return 0 if option.strip() == "0" else Amount.parse(option, name).of(0)
    size = trace.meta.get(name)
    return int(size) if isinstance(size, int | float) and size > 0 else 0
