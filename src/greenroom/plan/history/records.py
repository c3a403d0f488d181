"""Stored records of a model on a machine: settings, losses and memory, for later runs.

They are measured runs (plan/costs.py), settings that `tune` measured or a plan chose, with the
device and the capacity for which they hold, the loss of quality by approximated misses, and the
memory that a process takes outside of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import scope_of, split_of
from greenroom.json_file import JsonObject, Malformed, integer
from greenroom.plan.costs import RunMeasurement
from greenroom.policies import policy
from greenroom.predictors import predictor

NEAR = 0.15  # a setting holds for capacities that differ by no more than this share
MOST_RUNS = 12  # stored for a machine, the latest
LOADS = 3  # stored; the smallest counts, since a process that compiles takes more memory
SAME = 0.02  # sizes of processes that differ by no more than this share count as equal
OPTIONS = ("policy", "scope", "prefetch", "split")  # of a stored setting
BY = ("tune", "plan", "quick")  # the origin of a setting, the most trusted one first


@dataclass(frozen=True, slots=True)
class StoredSetting:
    """A stored setting for a cache of `capacity` slots.

    device:      cpu or cuda
    by:          its origin: tune, plan, or quick (a plan made as a run begins)
    tpot, plain: TPOT with it and with plain LRU in seconds; of a quick plan, misses a token
    tokens:      of the model's own routing, on which a quick plan was made
    """

    capacity: int
    options: Mapping[str, Any]
    by: str
    tpot: float
    plain: float
    when: str
    device: str = "cpu"
    tokens: int = 0

    @classmethod
    def from_json(cls, contents: Any, where: str = "a setting") -> StoredSetting:
        """Read a stored setting from JSON. Malformed or UsageError where a run cannot take it."""
        entry = JsonObject(contents, where)
        option_entry = entry.object("options")
        options = {name: option_entry.text(name) for name in OPTIONS if name in option_entry}
        policy(options.get("policy", "auto")).check_online()
        predictor(options.get("prefetch", "auto"))
        scope_of(options.get("scope", "shared"))
        split_of(options.get("split", "off"))
        if entry.text("by") not in BY:
            raise Malformed(f"{where}.by is {entry.text('by')!r}: not one of {', '.join(BY)}")
        return cls(options=options, **entry.fields_of(cls))


@dataclass(frozen=True, slots=True)
class Loss:
    """Measured loss of quality by approximating cache misses below given thresholds.

    The thresholds are those of core/options/precision.py. `inexact` is the share of requests that
    were not exact, `kl` the KL divergence from the exact model in nats, a mean over `tokens`; the
    perplexities are of both models.
    """

    precision: str
    low: float
    skip: float
    substitute: float
    inexact: float
    kl: float
    perplexity: float
    exact_perplexity: float
    tokens: int
    when: str

    @property
    def key(self) -> tuple[str, float, float, float]:
        return self.precision, self.low, self.skip, self.substitute

    @classmethod
    def from_json(cls, entry: Any, where: str = "a loss") -> Loss:
        """Read a measured loss of quality from JSON. Malformed for other contents."""
        return cls(**JsonObject(entry, where).fields_of(cls))


@dataclass(frozen=True, slots=True)
class Records:
    """Stored records of a model on one machine, the latest last.

    `loads` are the bytes of processes outside of dense weights and slots, once all was loaded.
    """

    runs: tuple[RunMeasurement, ...] = ()
    settings: tuple[StoredSetting, ...] = ()
    loads: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()

    @classmethod
    def from_json(cls, contents: Any) -> Records:
        """Read a model's records from JSON. Malformed or UsageError for other contents."""
        entry = JsonObject(contents)
        return cls(
            entry.list_of("runs", RunMeasurement.from_json, []),
            entry.list_of("settings", StoredSetting.from_json, []),
            entry.list_of("loads", integer, []),
            entry.list_of("losses", Loss.from_json, []),
        )

    @property
    def process(self) -> int | None:
        """Return the next process's expected bytes outside of its model; None if unknown."""
        return min(self.loads) if self.loads else None

    def nearest(self, capacity: int, device: str = "cpu") -> StoredSetting | None:
        """Return the stored setting with the nearest capacity, if it is near enough.

        Measured settings come first, then those of `plan`, then those of a quick plan.
        """
        fits = [s for s in self.settings if s.device == device and _is_near(s, capacity)]
        order = sorted(fits, key=lambda s: (BY.index(s.by), abs(s.capacity - capacity)))
        return order[0] if order else None

    def with_load(self, process: int) -> Records:
        """Add a process's bytes to the records; unchanged where they are as expected."""
        expected = self.process
        if expected is not None and abs(process - expected) <= SAME * expected:
            return self
        return replace(self, loads=(*self.loads, process)[-LOADS:])

    def loss(self, precision: str, low: float, skip: float, substitute: float) -> Loss | None:
        """Return the quality loss measured with exactly these thresholds, if any."""
        key = precision, low, skip, substitute
        return next((each for each in self.losses if each.key == key), None)

    def with_loss(self, loss: Loss) -> Records:
        """Add a measured quality loss, in place of one with the same thresholds."""
        others = tuple(each for each in self.losses if each.key != loss.key)
        return replace(self, losses=(*others, loss))

    def with_runs(self, runs: tuple[RunMeasurement, ...]) -> Records:
        return replace(self, runs=(*self.runs, *runs)[-MOST_RUNS:])

    def with_setting(self, setting: StoredSetting) -> Records:
        """Add a stored setting, in place of those of its capacity, device and origin."""
        others = tuple(
            s for s in self.settings
            if (s.by, s.device) != (setting.by, setting.device) or not _is_near(s, setting.capacity)
        )  # fmt: skip
        return replace(self, settings=(*others, setting))


def _is_near(setting: StoredSetting, capacity: int) -> bool:
    return abs(setting.capacity - capacity) <= NEAR * setting.capacity
