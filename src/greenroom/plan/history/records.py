"""What was found out about a model on a machine.

Runs that were observed (plan/costs.py), settings that `tune` measured or a plan chose, with the
device and the size that they hold for, what inexact misses cost in quality, and what a process took
beside its model.
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

NEAR = 0.15  # a setting holds for sizes of the cache that differ by no more than this share
MOST_RUNS = 12  # of a machine, the latest
LOADS = 3  # of which the least process counts: one that compiles takes more than those that follow
SAME = 0.02  # share by which processes differ that are the same
OPTIONS = ("policy", "scope", "prefetch", "split")  # that a stored setting has
BY = ("tune", "plan", "quick")  # how it was found, what is trusted most first


@dataclass(frozen=True, slots=True)
class StoredSetting:
    """A setting for a cache of `capacity` slots of a `device`, cpu or cuda; `by` is tune, plan or
    quick (a plan that a run made as it began). TPOTs are in seconds; of a quick plan they are
    misses a token, and `tokens` are those of the model's own routing that it went by.
    """

    capacity: int
    options: Mapping[str, Any]
    by: str
    tpot: float
    plain: float  # of plain LRU
    when: str
    device: str = "cpu"
    tokens: int = 0

    @classmethod
    def from_json(cls, contents: Any, where: str = "a setting") -> StoredSetting:
        """Malformed or UsageError where it is none, or none that a run can take."""
        entry = JsonObject(contents, where)
        option_entry = entry.object("options")
        options = {name: option_entry.text(name) for name in OPTIONS if name in option_entry}
        policy(options.get("policy", "auto")).check_online()
        predictor(options.get("prefetch", "auto"))
        scope_of(options.get("scope", "shared"))
        split_of(options.get("split", "off"))
        if entry.text("by") not in BY:
            raise Malformed(f"{where}.by is {entry.text('by')!r}")
        return cls(options=options, **entry.fields_of(cls))


@dataclass(frozen=True, slots=True)
class Loss:
    """What misses below these thresholds cost (core/options/precision.py), of which `inexact` is
    the share that was not exact: KL divergence from the exact model in nats, a mean over `tokens`,
    and the perplexities of both."""

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
        """Malformed where it is none."""
        return cls(**JsonObject(entry, where).fields_of(cls))


@dataclass(frozen=True, slots=True)
class Records:
    """All that is stored of a model on one machine. `loads` are bytes that processes took beside
    dense parts and slots, when all was loaded; the latest come last."""

    runs: tuple[RunMeasurement, ...] = ()
    settings: tuple[StoredSetting, ...] = ()
    loads: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()

    @classmethod
    def from_json(cls, contents: Any) -> Records:
        """Malformed or UsageError where they are none."""
        entry = JsonObject(contents)
        return cls(
            entry.list_of("runs", RunMeasurement.from_json, []),
            entry.list_of("settings", StoredSetting.from_json, []),
            entry.list_of("loads", integer, []),
            entry.list_of("losses", Loss.from_json, []),
        )

    @property
    def process(self) -> int | None:
        """Bytes that the next process will take, where one has been seen."""
        return min(self.loads) if self.loads else None

    def nearest(self, capacity: int, device: str = "cpu") -> StoredSetting | None:
        """The setting whose size is nearest, if it is near enough; what was measured goes first,
        then what was planned at leisure."""
        fits = [s for s in self.settings if s.device == device and _near(s, capacity)]
        order = sorted(fits, key=lambda s: (BY.index(s.by), abs(s.capacity - capacity)))
        return order[0] if order else None

    def with_load(self, process: int) -> Records:
        """Unchanged where it is what was expected."""
        expected = self.process
        if expected is not None and abs(process - expected) <= SAME * expected:
            return self
        return replace(self, loads=(*self.loads, process)[-LOADS:])

    def loss(self, precision: str, low: float, skip: float, substitute: float) -> Loss | None:
        """What was measured with exactly these thresholds."""
        key = precision, low, skip, substitute
        return next((each for each in self.losses if each.key == key), None)

    def with_loss(self, loss: Loss) -> Records:
        """It takes the place of the one with its thresholds."""
        others = tuple(each for each in self.losses if each.key != loss.key)
        return replace(self, losses=(*others, loss))

    def with_runs(self, runs: tuple[RunMeasurement, ...]) -> Records:
        return replace(self, runs=(*self.runs, *runs)[-MOST_RUNS:])

    def with_setting(self, setting: StoredSetting) -> Records:
        """It takes the place of those of its size that were found in the same way."""
        others = tuple(
            s for s in self.settings
            if (s.by, s.device) != (setting.by, setting.device) or not _near(s, setting.capacity)
        )  # fmt: skip
        return replace(self, settings=(*others, setting))


def _near(setting: StoredSetting, capacity: int) -> bool:
    return abs(setting.capacity - capacity) <= NEAR * setting.capacity
