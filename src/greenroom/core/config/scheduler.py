"""Settings of the expert scheduler and its options, for runs, simulations and plans."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

from greenroom.core.config.base import (
    AUTO,
    PLACEMENTS,
    PREFETCH_RULES,
    VALUE,
    Approximation,
    OptionConfig,
)
from greenroom.core.config.shares import scope_of, split_of
from greenroom.core.options.cache_bias import CacheBiasConfig
from greenroom.core.options.cocompute import CoComputeConfig
from greenroom.core.options.demand_order import DemandOrderConfig
from greenroom.core.options.expert_order import ExpertOrderConfig
from greenroom.core.options.precision import PrecisionConfig
from greenroom.errors import UsageError
from greenroom.option import CACHE, MACHINE, PREFETCHING, at_least, check_options, option

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.pieces import Pieces
    from greenroom.core.plan import Option

TAU = 5000  # tokens between two configurations of split experts' caches (MoEpic, section 4.1)
Config = TypeVar("Config", bound="SchedulerConfig")


# The bases are the table of options, in the order in which they change a plan; the last is none.
@dataclass(frozen=True)
class SchedulerConfig(
    PrecisionConfig,
    CacheBiasConfig,
    CoComputeConfig,
    DemandOrderConfig,
    ExpertOrderConfig,
    OptionConfig,
):
    """Settings of the scheduler, for every command that runs or simulates one."""

    scope: str = option(
        "shared", "one cache for all layers, one of equal size for each layer, or sizes: numbers"
        " (one a layer) or a file of `greenroom trace budgets`",
        "shared|per-layer|N,N,...|FILE", group=CACHE, check=lambda value, name: scope_of(value),
    )  # fmt: skip
    split: str = option(
        "off", "cache a top part of packed experts and fetch the rest when it is needed. The top's"
        " share of an expert: one as 0.5, numbers (one a layer), or a file of `greenroom trace"
        " budgets`; auto (in runs) sets budgets and shares from what earlier runs recorded"
        " (MoEpic's Algorithm 1)", "off|auto|SHARE|N,N,...|FILE",
        group=CACHE, check=lambda value, name: split_of(value),
    )  # fmt: skip

    device_placement: str = option(
        AUTO, "with several GPUs, what each of them has. experts: some experts of every layer;"
        " layers: all experts of some consecutive layers; auto: whichever takes less time for a"
        " token, by the GPU's data sheet and the share of experts that have slots",
        None, (AUTO, *PLACEMENTS), group=MACHINE,
    )  # fmt: skip
    prefetch_rule: str = option(
        VALUE, "which predicted experts are loaded early. value: those whose early load is"
        " expected to save time; top-k: as many of the likeliest as a token uses, whatever it"
        " costs; all: all predicted ones, the likeliest first",
        None, PREFETCH_RULES, group=PREFETCHING,
    )  # fmt: skip

    tau: int = option(
        TAU, "with --split auto, or in a simulation of moepic, tokens after which the slots are"
        " divided among the layers anew, while no request is computed; 0: never (default:"
        " %(default)s)",
        "TOKENS",
        group=CACHE, check=at_least(0, unit="token"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        for kind in OPTIONS:
            kind.check(self)
        at = self.approximation()
        if at is not None and at.precision != "off" and self.split != "off":
            raise UsageError("--miss-precision and --split exclude each other: give one of them")

    def approximation(self) -> Approximation | None:
        """Return what makes the output inexact, by all options together; None if nothing does.

        Every option that is on takes part: the result has the higher threshold of each kind and
        the other rules of all options. `Approximation` says which rule serves an expert if several
        could.
        """
        each_option = (kind.approximation(self) for kind in OPTIONS)
        active = [each for each in each_option if each is not None]
        return reduce(Approximation.merge, active) if active else None

    def uses_host(self) -> bool:
        """Tell whether any option lets the host's processor compute missing experts."""
        return any(kind.uses_host(self) for kind in OPTIONS)

    def proposes(self) -> bool:
        """Tell whether any option proposes experts to fetch while a link is idle."""
        return any(kind.proposes(self) for kind in OPTIONS)

    def changes_times(self) -> bool:
        """Tell whether any option changes times that only an event-driven simulation finds."""
        return any(kind.changes_times(self) for kind in OPTIONS)

    def options(
        self, pieces: Pieces, costs: Costs | None = None, expert_bytes: int = 0
    ) -> list[Option]:
        """Build the scheduler options that are on, in the order of this class's bases.

        The scheduler calls them in this order to change a step's plan. The arguments are those of
        `OptionConfig.build`.
        """
        options = (kind.build(self, pieces, costs, expert_bytes) for kind in OPTIONS)
        return [each for each in options if each is not None]

    def without_approximation(self: Config) -> Config:
        """Copy a scheduler configuration with all approximations at their defaults."""
        rows = [fields(kind) for kind in OPTIONS if kind.approximation(self) is not None]
        changes: dict[str, Any] = {each.name: each.default for row in rows for each in row}
        return replace(self, **changes)


OPTIONS: tuple[type[OptionConfig], ...] = SchedulerConfig.__bases__
NO_OPTIONS = SchedulerConfig()


def option_names() -> list[str]:
    """Return the field names of all scheduler options."""
    return [each.name for kind in OPTIONS for each in fields(kind)]


def with_options(config: Config, **values: Any) -> Config:
    """Copy a scheduler configuration with other values of its fields.

    UsageError if the configuration has no field of a given name.
    """
    for name in values:
        if name not in type(config).__dataclass_fields__:
            raise UsageError(
                f"there is no scheduler option {name!r}:"
                f" choose one of {', '.join(type(config).__dataclass_fields__)}"
            )
    return replace(config, **values)
