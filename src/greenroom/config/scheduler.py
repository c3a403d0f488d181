"""What tunes the scheduler, alike in a run and in `greenroom simulate`."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.option import check_options, option
from greenroom.config.values import (
    CO_COMPUTE,
    LOW_SHARE,
    PRECISIONS,
    gate_share,
    scope_of,
    share_of,
    split_of,
    thresholds_of,
)
from greenroom.errors import UsageError

MEMORY, CACHE, PREFETCHING, INEXACT, MACHINE = GROUPS = (
    "memory", "expert cache", "prefetching", "misses that get less, which changes the output",
    "machine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Options of every command that has a scheduler, with real bytes or in simulated time."""

    scope: str = option(
        "shared", "one cache for all layers, one a layer of equal size, or sizes as the numbers"
        " (one a layer) or the file of `greenroom trace budgets` say",
        "shared|per-layer|N,N,...|FILE", group=CACHE, check=lambda value, name: scope_of(value),
    )  # fmt: skip
    split: str = option(
        "off", "of packed experts keep a top part and fetch the rest when it is needed: a share of"
        " the expert as 0.5, or those of each layer as numbers or the file of `greenroom trace"
        " budgets` say; auto sets budgets and shares by what earlier runs recorded (MoEpic's"
        " Algorithm 1)", "off|auto|SHARE|N,N,...|FILE",
        group=CACHE, check=lambda value, name: split_of(value),
    )  # fmt: skip
    miss_precision: str = option(
        "off", "serve misses of small gate weight from the low-precision copies of a pack that has"
        " them (pack --miss-precision): faster, but THE OUTPUT CHANGES, and depends on what the"
        " cache holds", None, PRECISIONS, group=INEXACT,
    )  # fmt: skip
    low_below: float | None = option(
        None, "with --miss-precision: misses of experts that, with all smaller ones of the token,"
        " have less than this share of its gate weights (default: 0.4, which is HOBBIT's T1 = 0.6)",
        "SHARE", group=INEXACT, needs="miss_precision", check=gate_share,
    )  # fmt: skip
    low_share: str = option(
        LOW_SHARE, "with --miss-precision: share of the cache's memory that copies have", "SHARE",
        group=INEXACT, needs="miss_precision", check=share_of,
    )  # fmt: skip
    low_follow: bool = option(
        False, "with --miss-precision: the exact expert follows a copy that was used, while the"
        " link is idle, so that more is exact; tokens take longer",
        group=INEXACT, needs="miss_precision",
    )  # fmt: skip
    skip_below: float = option(
        0.0, "leave out misses below this share of the gate weights, which changes the output:"
        " HOBBIT's T2 = 0.9 is 0.1 (default: none)", "SHARE", group=INEXACT, check=gate_share,
    )  # fmt: skip
    substitute_below: float = option(
        0.0, "replace misses below this share of the gate weights by the expert that is there and"
        " was most often chosen with them, which changes the output (default: none)", "SHARE",
        group=INEXACT, check=gate_share,
    )  # fmt: skip
    co_compute: str = option(
        "off", "with a GPU, have the host's processor compute experts that are missing there, where"
        " that is sooner than to move them; answers may then differ in their last bits from run to"
        " run, by what was in the cache", None, CO_COMPUTE, group=MACHINE,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        self.thresholds()
        if self.miss_precision != "off" and self.split != "off":
            raise UsageError("--miss-precision and --split exclude each other: give one of them")

    def thresholds(self) -> tuple[float, float, float]:
        """(low, skip, substitute): shares of gate weights below which misses get less; 0 is off."""
        return thresholds_of(
            self.miss_precision, self.low_below, self.skip_below, self.substitute_below
        )
