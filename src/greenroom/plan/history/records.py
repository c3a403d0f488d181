"""Stored records of a model on a machine, for later runs and plans.

There are four kinds: measured runs (plan/costs.py); settings that `greenroom tune` measured or a
plan chose, with their device and cache capacity; losses of quality by approximated cache misses;
and the memory that a process takes besides the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import scope_of, split_of
from greenroom.json_file import JsonObject, Malformed, integer
from greenroom.plan.costs import RunMeasurement
from greenroom.policies import policy
from greenroom.policies.helpers.policy_file import SUFFIX
from greenroom.predictors import predictor

NEAR = 0.15  # a setting holds for capacities that differ by no more than this share
MOST_RUNS = 12  # stored for a machine, the latest
LOADS = 3  # stored; the smallest counts, since a process that compiles takes more memory
SAME = 0.02  # sizes of processes that differ by no more than this share count as equal
OPTIONS = ("policy", "scope", "prefetch", "split")  # of a stored setting
BY = ("tune", "plan", "quick")  # the origin of a setting, the most trusted one first


@dataclass(frozen=True, slots=True)
class StoredSetting:
    """A stored setting of a run: cache policy, scope, prefetching and split.

    capacity: slots of the expert cache for which the setting was chosen
    options:  the setting, as options of a run
    by:       origin of the setting: tune, plan, or quick (a plan made as a run begins)
    tpot:     seconds for each output token with the setting; of a quick plan, misses for each token
    plain:    the same with plain LRU
    when:     date of the measurement or plan, as 2025-12-31
    device:   cpu or cuda
    tokens:   recorded tokens on which a quick plan was based; 0 for a synthetic workload
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
        """Read a stored setting from JSON; raises Malformed or UsageError if it is invalid."""
        entry = JsonObject(contents, where)
        option_entry = entry.object("options")
        options = {name: option_entry.text(name) for name in OPTIONS if name in option_entry}
        name = options.get("policy", "auto")
        if name.partition(":")[0].endswith(SUFFIX):
            raise Malformed(
                f"{where} names a policy's file, whose code runs only where it is asked for"
            )
        policy(name).check_online()
        predictor(options.get("prefetch", "auto"))
        scope_of(options.get("scope", "shared"))
        split_of(options.get("split", "off"))
        if entry.text("by") not in BY:
            raise Malformed(
                f"{where}.by is {entry.text('by')!r}, but must be one of {', '.join(BY)}"
            )
        return cls(options=options, **entry.fields_of(cls))


@dataclass(frozen=True, slots=True)
class Loss:
    """Measured loss of quality by approximating cache misses, or by biased routers.

    precision:        precision of the copies that serve misses, or off
    low:              tail weight below which a copy serves a miss (--low-below)
    skip:             tail weight below which a miss is left out (--skip-below)
    substitute:       tail weight below which a resident expert replaces it (--substitute-below)
    inexact:          share of the expert evaluations that were not exact
    kl:               KL divergence from the exact model in nats, a mean over `tokens`
    perplexity:       perplexity of the approximated model
    exact_perplexity: perplexity of the exact model
    tokens:           number of tokens that were measured
    when:             date of the measurement, as 2025-12-31
    bias:             what routers add to the scores of experts in the cache (--cache-bias)
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
    bias: float = 0.0

    @property
    def key(self) -> tuple[str, float, float, float, float]:
        return self.precision, self.low, self.skip, self.substitute, self.bias

    @classmethod
    def from_json(cls, entry: Any, where: str = "a loss") -> Loss:
        """Read a measured loss of quality from JSON; raises Malformed if a field is wrong."""
        return cls(**JsonObject(entry, where).fields_of(cls))


@dataclass(frozen=True, slots=True)
class Records:
    """Stored records of a model on one machine, each kind with the latest last.

    runs:     measured runs
    settings: settings that were measured or chosen by a plan
    loads:    bytes of processes besides weights and expert cache, once the model was loaded
    losses:   losses of quality by approximated cache misses
    """

    runs: tuple[RunMeasurement, ...] = ()
    settings: tuple[StoredSetting, ...] = ()
    loads: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()

    @classmethod
    def from_json(cls, contents: Any) -> Records:
        """Read a model's records from JSON; raises Malformed or UsageError if they are invalid."""
        entry = JsonObject(contents)
        return cls(
            entry.list_of("runs", RunMeasurement.from_json, []),
            entry.list_of("settings", StoredSetting.from_json, []),
            entry.list_of("loads", integer, []),
            entry.list_of("losses", Loss.from_json, []),
        )

    @property
    def process(self) -> int | None:
        """Return the expected bytes of a process besides the model; None if unknown."""
        return min(self.loads) if self.loads else None

    def nearest(self, capacity: int, device: str = "cpu") -> StoredSetting | None:
        """Return the stored setting for a similar cache capacity on a device; None without one.

        A setting is similar if its capacity differs by at most 15 %. Settings that `greenroom tune`
        measured come first, then those of `greenroom plan`, then those of quick plans; among equals
        the nearest capacity wins.
        """
        fits = [s for s in self.settings if s.device == device and _is_near(s, capacity)]
        order = sorted(fits, key=lambda s: (BY.index(s.by), abs(s.capacity - capacity)))
        return order[0] if order else None

    def with_load(self, process: int) -> Records:
        """Add the bytes that a process took besides the model.

        The records are unchanged if the bytes are within 2 % of the expected ones.
        """
        expected = self.process
        if expected is not None and abs(process - expected) <= SAME * expected:
            return self
        return replace(self, loads=(*self.loads, process)[-LOADS:])

    def loss(
        self, precision: str, low: float, skip: float, substitute: float, bias: float = 0.0
    ) -> Loss | None:
        """Return the quality loss measured with exactly this precision, thresholds and bias.

        None if there is none.
        """
        key = precision, low, skip, substitute, bias
        return next((each for each in self.losses if each.key == key), None)

    def with_loss(self, loss: Loss) -> Records:
        """Add a measured quality loss, in place of one with the same precision and thresholds."""
        others = tuple(each for each in self.losses if each.key != loss.key)
        return replace(self, losses=(*others, loss))

    def with_runs(self, runs: tuple[RunMeasurement, ...]) -> Records:
        return replace(self, runs=(*self.runs, *runs)[-MOST_RUNS:])

    def with_setting(self, setting: StoredSetting) -> Records:
        """Add a setting, in place of similar ones.

        Similar settings have the same device and origin, and a capacity that differs by at most 15
        %.
        """
        others = tuple(
            s for s in self.settings
            if (s.by, s.device) != (setting.by, setting.device) or not _is_near(s, setting.capacity)
        )  # fmt: skip
        return replace(self, settings=(*others, setting))


def _is_near(setting: StoredSetting, capacity: int) -> bool:
    return abs(setting.capacity - capacity) <= NEAR * setting.capacity
