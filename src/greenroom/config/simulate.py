"""Options of `greenroom simulate` and `greenroom trace budgets`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from greenroom.amounts import Amount
from greenroom.config.tables import SYSTEMS
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.errors import UnknownName, UsageError
from greenroom.option import (
    INEXACT,
    REQUIRED,
    at_least,
    check_needed,
    check_options,
    option,
    options_in,
)

ORDERS, PINS = ("natural", "rounds", "runtime"), ("step", "none")
METHODS = ("marginal", "optimal", "moepic")
TIME = "time"
TIMED = {each.name for each in options_in(SchedulerConfig)} - {
    "scope"
}  # these options need --machine


def expert_size(value: str, name: str) -> None:
    if Amount.parse(value, name).nbytes is None:
        raise UsageError(f"{name} must be in bytes, as 12MiB, got {value}")


def dense_size(value: str, name: str) -> None:
    if value.strip() != "0":
        expert_size(value, name)


def check_pin(value: str, name: str) -> None:
    if value not in PINS and not (Path(value).suffix == ".json" or os.path.isfile(value)):
        raise UnknownName("pin", value, [*PINS, "FILE"])


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SchedulerConfig):
    """Options of `greenroom simulate`."""

    policy: str | None = option(
        None, "eviction policies to compare: lru, auto, ...", "P[,P...]", shown=True
    )
    system: str | None = option(
        None, f"complete systems instead of policies: {', '.join(SYSTEMS)}; other options"
        " override their settings", "S[,S...]", shown=True,
    )  # fmt: skip
    capacity: str = option(
        REQUIRED,
        "size of the expert cache: a number of experts, or 25%% of all",
        "N[,N...]",
        shown=True,
    )
    order: str | None = option(
        None, "order of the trace's requests (default: natural; with --machine runtime, the order"
        " of"
        " real passes)", None, ORDERS, shown=True,
    )  # fmt: skip
    pin: str = option(
        "step", "step: experts in use are not evicted; none: they may be; FILE, made by"
        " `greenroom trace"
        " hot`: neither are its experts (default: %(default)s)", "step|none|FILE",
        check=check_pin,
    )  # fmt: skip
    seed: int = option(0, "seed of policies that use random numbers", "N")
    limit: int | None = option(
        None,
        "use only this many first tokens of the trace",
        "TOKENS",
        check=at_least(1, unit="token"),
        shown=True,
    )
    reset: bool = option(False, "empty the cache before every request")
    ray: str | None = option(
        None, "run on the Ray cluster at this address; local starts one here", "ADDRESS"
    )
    machine: str | None = option(
        None, "also simulate times, with this machine profile, made by `greenroom doctor`; auto:"
        " of this"
        " machine", "FILE", group=TIME, shown=True,
    )  # fmt: skip
    host_capacity: str | None = option(
        None, "experts that main memory holds between disk and GPU: a number, or 25%% of all"
        " (default: none)", "N", group=TIME,
    )  # fmt: skip
    devices: int = option(
        1, "number of equal processors that share the experts, each with its own link; --capacity"
        " is"
        " for all together", "N", group=TIME, check=at_least(1),
    )  # fmt: skip
    prefetch: str | None = option(
        None, "load experts before they are needed, by these predictors: markov, next-gate:2,"
        " oracle,"
        " ...; off (default) is a run without, to compare",
        "NAME[:D][,...]", group=TIME, shown=True,
    )  # fmt: skip
    ahead: int | None = option(
        None, "most slots for prefetched experts at a time, at most a quarter of all (default: as"
        " `greenroom run`)", "N", group=TIME, check=at_least(1, unit="slot"),
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "size of one expert: 12MiB (default: from the trace)", "SIZE",
        group=TIME, check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "size of one layer without its experts (default: from the trace, or 0: such layers"
        " then"
        " take no time)", "SIZE", group=TIME, check=dense_size,
    )  # fmt: skip
    store: str | None = option(
        None, "storage of the experts (default: the beginning of the profile's first link)",
        "PLACE",
        group=TIME,
    )  # fmt: skip
    processor: str | None = option(
        None, "processor that computes the experts (default: the profile's first)", "NAME",
        group=TIME,
    )  # fmt: skip
    nested: bool = option(
        False,
        "with --miss-precision int4: experts are int8 and contain their copies",
        group=INEXACT,
    )

    def __post_init__(self) -> None:
        at = self.approximation()
        if self.nested and (at is None or at.precision != "int4"):
            raise UsageError(
                "--nested is for --miss-precision int4: int8 experts contain such copies"
            )
        SchedulerConfig.__post_init__(self)
        if self.split == "auto":
            raise UsageError(
                "--split auto works in `greenroom run` alone, by what runs record: give a share,"
                " or a file"
            )
        self._check_policies()
        for each in options_in(self):
            if each.metadata["group"] == TIME or each.name in TIMED:
                check_needed(self, each, "machine")
        if self.machine is not None and self.order not in (None, "runtime"):
            raise UsageError(
                "--machine times real passes: leave out --order, or give --order runtime"
            )
        if self.pin not in PINS and (self.replayed != "runtime" or self.machine is not None):
            raise UsageError(
                "--pin FILE is about misses of real passes: give --order runtime, and no --machine"
            )
        if self.ahead is not None and self.prefetch is None:
            raise UsageError("--ahead has an effect only with --prefetch")

    def _check_policies(self) -> None:
        if self.policy is None and self.system is None:
            raise UsageError("say who is evicted: --policy lru,auto, or --system llru,greenroom")
        if self.system is not None and self.policy is not None and "," in self.policy:
            raise UsageError("--policy beside --system overrides the policy of every row: give one")

    @property
    def replayed(self) -> str:
        """The order in which the simulation replays a trace's requests."""
        return self.order or ("natural" if self.machine is None else "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetsConfig:
    """Options of `greenroom trace budgets`, which divides slots among layers."""

    capacity: str = option(
        REQUIRED, "slots of all layers together: a number, or 25%% of the experts", "N"
    )
    method: str = option(
        "optimal", "marginal: the next slots to the layer that gains most; optimal: the least sum,"
        " by a dynamic programme; moepic: its Algorithm 1, which splits experts too", None, METHODS,
    )  # fmt: skip
    machine: str | None = option(
        None, "minimise waiting times on the machine of this profile instead of misses; auto: of"
        " this"
        " machine; moepic needs it", "FILE",
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "size of one expert (default: from the trace)", "SIZE",
        needs="machine", check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "size of one layer without its experts (default: from the trace, or 0)", "SIZE",
        needs="machine", check=dense_size,
    )  # fmt: skip
    predictions: str | None = option(
        None, "moepic: name of the trace's predictions for prefetching (default: its first)",
        "NAME",
    )  # fmt: skip
    zeta: float = option(0.01, "moepic: share of all slots that one step moves", "Z")
    limit: int | None = option(
        None,
        "use only this many first tokens of the trace",
        "TOKENS",
        check=at_least(1, unit="token"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.method == "moepic" and self.machine is None:
            raise UsageError("--method moepic weighs loading against computing: give --machine")
