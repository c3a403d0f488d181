"""How `greenroom simulate` replays a trace, and `greenroom trace budgets` reads one."""

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
TIMED = {each.name for each in options_in(SchedulerConfig)} - {"scope"}  # these need a machine


def expert_size(value: str, name: str) -> None:
    if Amount.parse(value, name).nbytes is None:
        raise UsageError(f"{name} {value}: write bytes, as 12MiB")


def dense_size(value: str, name: str) -> None:
    if value.strip() != "0":
        expert_size(value, name)


def check_pin(value: str, name: str) -> None:
    if value not in PINS and not (Path(value).suffix == ".json" or os.path.isfile(value)):
        raise UnknownName("pin", value, [*PINS, "FILE"])


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SchedulerConfig):
    """What is replayed, and on which machine."""

    policy: str | None = option(None, "who is evicted; auto is the default", "P[,P...]", shown=True)
    system: str | None = option(
        None, f"named systems instead of policies: {', '.join(SYSTEMS)}; options given beside it"
        " override its row", "S[,S...]", shown=True,
    )  # fmt: skip
    capacity: str = option(REQUIRED, "slots, or 25%% of all experts", "N[,N...]", shown=True)
    order: str | None = option(
        None, "how the requests follow one another (default: natural; runtime with --machine, since"
        " times are those of real passes)", None, ORDERS, shown=True,
    )  # fmt: skip
    pin: str = option(
        "step", "whether the experts of a step are safe while it is served; the file of `greenroom"
        " trace hot` keeps its experts for good, too (default: %(default)s)", "step|none|FILE",
        check=check_pin,
    )  # fmt: skip
    seed: int = option(0, "of policies that draw lots", "N")
    limit: int | None = option(
        None, "only the trace's first tokens", "TOKENS", check=at_least(1, unit="token"), shown=True
    )
    reset: bool = option(False, "begin every request with an empty cache")
    ray: str | None = option(
        None, "run the cells on a Ray cluster; local starts one here", "ADDRESS"
    )
    machine: str | None = option(
        None, "also say how long it takes on the machine of this profile, as `greenroom doctor`"
        " writes it; auto is this machine's", "FILE", group=TIME, shown=True,
    )  # fmt: skip
    host_capacity: str | None = option(
        None, "slots in host memory that keep experts between the disk and a device, or 25%% of all"
        " experts (default: none)", "N", group=TIME,
    )  # fmt: skip
    devices: int = option(
        1, "spread the experts over so many alike processors, each with a last link of its own;"
        " --capacity is that of all together", "N", group=TIME, check=at_least(1),
    )  # fmt: skip
    prefetch: str | None = option(
        None, "fetch experts before they are asked for, by a predictor: markov, next-gate:2,"
        " oracle, ...; off (default) among several is the run without, to compare with",
        "NAME[:D][,...]", group=TIME, shown=True,
    )  # fmt: skip
    ahead: int | None = option(
        None, "slots that prefetches may have at a time, at most a quarter of all (default: as a"
        " run has it)", "N", group=TIME, check=at_least(1, unit="slot"),
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "of one expert: 12MiB (default: what the trace says)", "SIZE",
        group=TIME, check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "of one layer without its experts (default: what the trace says, else 0: such layers"
        " then take no time)", "SIZE", group=TIME, check=dense_size,
    )  # fmt: skip
    store: str | None = option(
        None, "where the experts wait (default: the profile's first link begins there)", "PLACE",
        group=TIME,
    )  # fmt: skip
    processor: str | None = option(
        None, "what computes them (default: the profile's first)", "NAME",
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
                "--split auto is set by what runs record: give simulate a share, or a file"
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
        """The order of the requests."""
        return self.order or ("natural" if self.machine is None else "runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetsConfig:
    """How slots are shared out among the layers."""

    capacity: str = option(REQUIRED, "slots of all layers, or 25%% of the experts", "N")
    method: str = option(
        "optimal", "marginal: the next slots to the layer that gains most; optimal: the least sum,"
        " by a dynamic programme; moepic: its Algorithm 1, which splits experts too", None, METHODS,
    )  # fmt: skip
    machine: str | None = option(
        None, "minimise the seconds that computing does not hide on the machine of this profile,"
        " not misses; auto: of this one; moepic needs it", "FILE",
    )  # fmt: skip
    expert_bytes: str | None = option(
        None, "of one expert (default: what the trace says)", "SIZE",
        needs="machine", check=expert_size,
    )  # fmt: skip
    dense_bytes: str | None = option(
        None, "of one layer without its experts (default: what the trace says, else 0)", "SIZE",
        needs="machine", check=dense_size,
    )  # fmt: skip
    predictions: str | None = option(
        None, "moepic: the trace's predictions that experts would be prefetched by (default: the"
        " first there are)", "NAME",
    )  # fmt: skip
    zeta: float = option(0.01, "moepic: share of all slots that one step moves", "Z")
    limit: int | None = option(
        None, "only the trace's first tokens", "TOKENS", check=at_least(1, unit="token")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.method == "moepic" and self.machine is None:
            raise UsageError("--method moepic weighs loading against computing: give --machine")
