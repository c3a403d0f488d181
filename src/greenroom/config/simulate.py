"""Options of `greenroom simulate` and `greenroom trace budgets`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from greenroom.amounts import Amount
from greenroom.config.serve import LOOKUP, OFF
from greenroom.config.tables import SYSTEMS
from greenroom.core.config.base import AUTO, VALUE
from greenroom.core.config.scheduler import TAU, SchedulerConfig
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
    """Check the value of --expert-bytes, which must be in bytes. UsageError for a share."""
    if Amount.parse(value, name).nbytes is None:
        raise UsageError(f"{name} must be in bytes, as 12MiB, got {value!r}")


def dense_size(value: str, name: str) -> None:
    """Check the value of --dense-bytes: an amount in bytes, or 0. UsageError for a share."""
    if value.strip() != "0":
        expert_size(value, name)


def check_pin(value: str, name: str) -> None:
    """Check the value of --pin: step, none, or a JSON file. UnknownName for others."""
    if value not in PINS and not (Path(value).suffix == ".json" or os.path.isfile(value)):
        raise UnknownName("pin", value, [*PINS, "FILE"])


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SchedulerConfig):
    """Options of `greenroom simulate`."""

    policy: str | None = option(
        None,
        "eviction policies to compare, as lru,auto (this or --system is needed)",
        "P[,P...]",
        shown=True,
    )
    system: str | None = option(
        None, "published systems (policy, prefetching and more) to compare, in place of --policy:"
        f" {', '.join(SYSTEMS)}; NAME+greenroom prefetches only what saves time; your other"
        " options override theirs", "S[,S...]", shown=True,
    )  # fmt: skip
    capacity: str = option(
        REQUIRED,
        "sizes of the expert cache to compare: numbers of experts, or shares of all as 25%%",
        "N[,N...]",
        shown=True,
    )
    order: str | None = option(
        None, "order in which the trace's expert requests are replayed (default: natural, token by"
        " token; with --machine: runtime, pass by pass as a run computes"
        " them)", None, ORDERS, shown=True,
    )  # fmt: skip
    pin: str = option(
        "step", "which experts are never evicted. step: those that the present pass uses in the"
        " present layer; none: no expert; FILE, made by `greenroom trace hot`: those of step and"
        " those in the file (default: %(default)s)", "step|none|FILE",
        check=check_pin,
    )  # fmt: skip
    seed: int = option(0, "seed of the random numbers that some policies use", "N")
    limit: int | None = option(
        None,
        "use only the first TOKENS tokens of the trace",
        "TOKENS",
        check=at_least(1, unit="token"),
        shown=True,
    )
    reset: bool = option(False, "empty the cache before every request")
    resize: str | None = option(
        None, "give the cache another size from some tokens on, as when other processes need"
        " memory for a time: 1000:12%%,2000:25%%", "TOKEN:N[,...]",
    )  # fmt: skip
    ray: str | None = option(
        None,
        "run the simulations on the Ray cluster at this address; local: start one here",
        "ADDRESS",
    )
    machine: str | None = option(
        None, "also simulate times on the machine of this profile, which `greenroom doctor` wrote;"
        " auto: on this machine", "FILE", group=TIME, shown=True,
    )  # fmt: skip
    host_capacity: str | None = option(
        None, "experts that main memory caches between disk and GPU: a number, or 25%% of all;"
        " with --miss-precision also their copies (default: no such cache)", "N", group=TIME,
    )  # fmt: skip
    devices: int = option(
        1, "number of equal processors among which the experts are divided, each with its own"
        " link; --capacity counts the slots of all together", "N", group=TIME, check=at_least(1),
    )  # fmt: skip
    prefetch: str | None = option(
        None, "load experts before they are needed, by each of these predictors in turn: markov,"
        " next-gate:2 (two layers ahead), oracle, ...; off (default): without prefetching",
        "NAME[:D][,...]", group=TIME, shown=True,
    )  # fmt: skip
    speculate: str = option(
        OFF, "lookup: decode passes verify drafts, as in `greenroom run --speculate lookup`; the"
        " trace must have token ids", None, (OFF, LOOKUP), group=TIME,
    )  # fmt: skip
    ahead: int | None = option(
        None, "with --prefetch, most slots that hold prefetched experts at a time, at most a"
        " quarter of all slots (default: as in `greenroom run`)", "N",
        group=TIME, check=at_least(1, unit="slot"),
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "with --machine, size of one expert: 12MiB (default: as the trace says)", "SIZE",
        group=TIME, check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "with --machine, size of one layer without its experts (default: as the trace says,"
        " or 0: attention and other dense parts take no time)",
        "SIZE", group=TIME, check=dense_size,
    )  # fmt: skip
    store: str | None = option(
        None,
        "where the experts are stored, by the profile's name for it (default: where its first"
        " link begins)",
        "PLACE",
        group=TIME,
    )  # fmt: skip
    processor: str | None = option(
        None, "processor that computes, by its name in the profile (default: the profile's first)",
        "NAME",
        group=TIME,
    )  # fmt: skip
    nested: bool = option(
        False,
        "with --miss-precision int4: experts are int8, and their int4 copies are a part of them",
        group=INEXACT,
    )

    def __post_init__(self) -> None:
        at = self.approximation()
        if self.nested and (at is None or at.precision != "int4"):
            raise UsageError(
                "--nested is for --miss-precision int4, whose copies are a part of int8 experts:"
                " give --miss-precision int4, or leave out --nested"
            )
        SchedulerConfig.__post_init__(self)
        if at is not None and at.bias:
            raise UsageError(
                "--cache-bias changes routers' choices, and a trace has no scores of the experts"
                " that were not chosen: record a trace with it (`greenroom trace record MODEL"
                " --cache-bias SHARE`), and simulate that"
            )
        if self.split == "auto":
            raise UsageError(
                "--split auto takes shares from a model's earlier runs, which a simulation does not"
                " have: give a share as 0.5, or a file of `greenroom trace budgets`"
            )
        if self.tau != TAU and self.system is None:
            raise UsageError("--tau has an effect only with --system moepic: give both, or neither")
        self._check_policies()
        for each in options_in(self):
            if each.metadata["group"] == TIME or each.name in TIMED:
                check_needed(self, each, "machine")
        if self.machine is not None and self.order not in (None, "runtime"):
            raise UsageError(
                f"--machine simulates the passes of a run, not --order {self.order}: leave out"
                " --order, or give --order runtime"
            )
        if self.devices == 1 and self.device_placement != AUTO:
            raise UsageError(
                f"--device-placement {self.device_placement} needs several devices: give --devices"
            )
        if self.pin not in PINS and (self.replayed != "runtime" or self.machine is not None):
            raise UsageError("--pin FILE works only with --order runtime and without --machine")
        if self.resize is not None and self.machine is not None:
            raise UsageError("--resize counts misses only: leave out --machine")
        if self.ahead is not None and self.prefetch is None:
            raise UsageError("--ahead has an effect only with --prefetch")
        if self.prefetch_rule != VALUE and self.prefetch is None and self.system is None:
            raise UsageError("--prefetch-rule has an effect only with --prefetch or --system")

    def _check_policies(self) -> None:
        if self.policy is None and self.system is None:
            raise UsageError(
                "nothing to simulate: give policies as --policy lru,auto, or systems as --system"
                " llru,greenroom"
            )
        if self.system is not None and self.policy is not None and "," in self.policy:
            raise UsageError(
                f"--policy {self.policy} names several policies, but with --system one policy"
                " replaces that of every system: give one"
            )

    @property
    def replayed(self) -> str:
        """The order in which a simulation replays a trace: natural, rounds or runtime."""
        return self.order or ("natural" if self.machine is None else "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetsConfig:
    """Options of `greenroom trace budgets`, which divides cache slots among layers."""

    capacity: str = option(
        REQUIRED, "cache slots of all layers together: a number, or 25%% of the experts", "N"
    )
    method: str = option(
        "optimal", "how slots are divided. optimal: for the fewest misses in total, by a dynamic"
        " programme; marginal: each time to the layer that gains most; moepic: by Algorithm 1 of"
        " the MoEpic paper, which also splits experts", None, METHODS,
    )  # fmt: skip
    machine: str | None = option(
        None, "minimise the time spent waiting for experts, on the machine of this profile, in"
        " place of misses; auto: on this machine. --method moepic needs it", "FILE",
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "with --machine, size of one expert (default: as the trace says)", "SIZE",
        needs="machine", check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "with --machine, size of one layer without its experts (default: as the trace says,"
        " or 0)", "SIZE",
        needs="machine", check=dense_size,
    )  # fmt: skip
    predictions: str | None = option(
        None, "with --method moepic: which predictions in the trace to use, by name (default: the"
        " first)",
        "NAME",
    )  # fmt: skip
    zeta: float = option(0.01, "with --method moepic: share of all slots that one step moves", "Z")
    limit: int | None = option(
        None,
        "use only the first TOKENS tokens of the trace",
        "TOKENS",
        check=at_least(1, unit="token"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.method == "moepic" and self.machine is None:
            raise UsageError(
                "--method moepic needs the times of loading and computing: give --machine"
            )
