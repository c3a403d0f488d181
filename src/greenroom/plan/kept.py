"""What was found out about a model on a machine, kept for the runs that follow.

One JSON file a model, named by its fingerprint, in the user's cache folder, with an entry for each
machine: runs that were observed (plan/costs.py), settings that `tune` measured, or a plan chose,
with the device and the size that they hold for, and what a process took beside its model. It can be
deleted at any time; one that cannot be read is passed over, and replaced by the next that is
written. GREENROOM_LEARNED=off keeps nothing, and reads nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from greenroom.config import scope_of, split_of
from greenroom.errors import OutputError, UsageError
from greenroom.json_file import JsonObject, Malformed, read, whole
from greenroom.plan.costs import Observed
from greenroom.policies import policy
from greenroom.predictors import predictor
from greenroom.trace.container import beside

FORMAT, VERSION = "greenroom-kept", 1
SWITCH = "GREENROOM_LEARNED"
NEAR = 0.15  # a setting holds for sizes of the cache that differ by no more than this share
MOST_RUNS = 12  # of a machine, the latest
LOADS = 3  # of which the least process counts: one that compiles takes more than those that follow
SAME = 0.02  # share by which processes differ that are the same
OPTIONS = ("policy", "scope", "prefetch", "split")  # that a kept setting has
BY = ("tune", "plan", "quick")  # how it was found, what is trusted most first


@dataclass(frozen=True, slots=True)
class Kept:
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
    def from_json(cls, found: Any, where: str = "a setting") -> Kept:
        """Malformed or UsageError where it is none, or none that a run can take."""
        entry = JsonObject(found, where)
        given = entry.object("options")
        options = {name: given.text(name) for name in OPTIONS if name in given}
        policy(options.get("policy", "auto")).check_online()
        predictor(options.get("prefetch", "auto"))
        scope_of(options.get("scope", "shared"))
        split_of(options.get("split", "off"))
        if (by := entry.text("by")) not in BY:
            raise Malformed(f"{where}.by is {by!r}")
        return cls(
            entry.whole("capacity"), options, by, entry.number("tpot"), entry.number("plain"),
            entry.text("when"), entry.text("device", "cpu"), entry.whole("tokens", 0),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Loss:
    """What misses below these thresholds cost (core/precision.py), of which `inexact` is the share
    that was not exact: KL divergence from the exact model in nats, a mean over `tokens`, and the
    perplexities of both."""

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
    def from_json(cls, found: Any, where: str = "a loss") -> Loss:
        """Malformed where it is none."""
        entry = JsonObject(found, where)
        return cls(
            entry.text("precision"), entry.number("low"), entry.number("skip"),
            entry.number("substitute"), entry.number("inexact"), entry.number("kl"),
            entry.number("perplexity"), entry.number("exact_perplexity"), entry.whole("tokens"),
            entry.text("when"),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """All that is kept of a model on one machine. `loads` are bytes that processes took beside
    dense parts and slots, when all was loaded; the latest come last."""

    runs: tuple[Observed, ...] = ()
    settings: tuple[Kept, ...] = field(default=())
    loads: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def process(self) -> int | None:
        """Bytes that the next process will take, where one has been seen."""
        return min(self.loads) if self.loads else None

    def near(self, capacity: int, device: str = "cpu") -> Kept | None:
        """The setting whose size is nearest, if it is near enough; what was measured goes first,
        then what was planned at leisure."""
        fits = [s for s in self.settings if s.device == device and _near(s, capacity)]
        order = sorted(fits, key=lambda s: (BY.index(s.by), abs(s.capacity - capacity)))
        return order[0] if order else None

    def with_load(self, process: int) -> Known:
        """Unchanged where it is what was expected."""
        known = self.process
        if known is not None and abs(process - known) <= SAME * known:
            return self
        return replace(self, loads=(*self.loads, process)[-LOADS:])

    def loss(self, precision: str, low: float, skip: float, substitute: float) -> Loss | None:
        """What was measured with exactly these thresholds."""
        wanted = precision, low, skip, substitute
        return next((each for each in self.losses if each.key == wanted), None)

    def with_loss(self, loss: Loss) -> Known:
        """It takes the place of the one with its thresholds."""
        others = tuple(each for each in self.losses if each.key != loss.key)
        return replace(self, losses=(*others, loss))

    def with_runs(self, runs: tuple[Observed, ...]) -> Known:
        return replace(self, runs=(*self.runs, *runs)[-MOST_RUNS:])

    def with_setting(self, setting: Kept) -> Known:
        """It takes the place of those of its size that were found in the same way."""
        others = tuple(
            s for s in self.settings
            if (s.by, s.device) != (setting.by, setting.device) or not _near(s, setting.capacity)
        )  # fmt: skip
        return replace(self, settings=(*others, setting))


def _near(setting: Kept, capacity: int) -> bool:
    return abs(setting.capacity - capacity) <= NEAR * setting.capacity


def path_of(fingerprint: str) -> Path:
    """The file of a model. ValueError where its fingerprint cannot be a file's name."""
    if not re.fullmatch(r"\w[\w.-]{0,127}", fingerprint):
        raise ValueError(f"no fingerprint: {fingerprint!r}")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom" / "plans" / f"{fingerprint}.json"


def switched_on() -> bool:
    """Whether anything is to be kept and read."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def load(fingerprint: str, machine: str) -> Known:
    """What is kept of a model on the machine of this name; nothing where none can be read."""
    try:
        entry = JsonObject(_read(fingerprint).get(machine, {}))
        return Known(
            entry.each("runs", Observed.from_json, []),
            entry.each("settings", Kept.from_json, []),
            entry.each("loads", whole, []),
            entry.each("losses", Loss.from_json, []),
        )
    except (Malformed, UsageError):
        return Known()


def save(fingerprint: str, machine: str, known: Known) -> Path | None:
    """Keep this for the machine; None where nothing is to be kept. OutputError as usual."""
    if not switched_on():
        return None
    path = path_of(fingerprint)
    machines = _read(fingerprint)
    machines[machine] = {
        "runs": [run.as_json() for run in known.runs],
        "settings": [setting.as_json() for setting in known.settings],
        "loads": list(known.loads),
        "losses": [asdict(loss) for loss in known.losses],
    }
    text = json.dumps({"format": FORMAT, "version": VERSION, "machines": machines}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    return path


def _read(fingerprint: str) -> dict[str, Any]:
    """The entries of all machines."""
    if not switched_on():
        return {}
    try:
        found = read(path_of(fingerprint))
    except (OSError, Malformed):
        return {}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}
    machines = found.get("machines") if found.get("version") == VERSION else None
    return machines if isinstance(machines, dict) else {}
