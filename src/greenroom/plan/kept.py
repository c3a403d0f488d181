"""What was found out about a model on a machine, kept for the runs that follow.

One JSON file a model, named by its fingerprint, in the user's cache folder, with an entry for each
machine: runs that were observed (plan/costs.py), and settings that `tune` measured, or `plan` chose
for sure, with the size that they hold for. It can be deleted at any time; one that cannot be read
is passed over, and replaced by the next that is written. GREENROOM_LEARNED=off keeps nothing, and
reads nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from greenroom.errors import OutputError
from greenroom.plan.costs import Observed
from greenroom.trace.container import beside

FORMAT, VERSION = "greenroom-kept", 1
SWITCH = "GREENROOM_LEARNED"
NEAR = 0.15  # a setting holds for sizes of the cache that differ by no more than this share
MOST_RUNS = 12  # of a machine, the latest
OPTIONS = ("policy", "scope", "prefetch", "split")  # that a kept setting has


@dataclass(frozen=True, slots=True)
class Kept:
    """A setting for a cache of `capacity` slots; `by` is tune or plan, TPOTs in seconds."""

    capacity: int
    options: Mapping[str, Any]
    by: str
    tpot: float
    plain: float  # of plain LRU
    when: str

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Kept:
        options = {name: entry["options"][name] for name in OPTIONS if name in entry["options"]}
        return cls(
            int(entry["capacity"]), options, str(entry["by"]), float(entry["tpot"]),
            float(entry["plain"]), str(entry["when"]),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Known:
    """All that is kept of a model on one machine."""

    runs: tuple[Observed, ...] = ()
    settings: tuple[Kept, ...] = field(default=())

    def near(self, capacity: int) -> Kept | None:
        """The setting whose size is nearest, if it is near enough; what was measured goes first."""
        fits = [s for s in self.settings if abs(s.capacity - capacity) <= NEAR * s.capacity]
        order = sorted(fits, key=lambda s: (s.by != "tune", abs(s.capacity - capacity)))
        return order[0] if order else None

    def with_runs(self, runs: tuple[Observed, ...]) -> Known:
        return replace(self, runs=(*self.runs, *runs)[-MOST_RUNS:])

    def with_setting(self, setting: Kept) -> Known:
        """It takes the place of those of its size that were found in the same way."""
        others = tuple(
            s for s in self.settings
            if s.by != setting.by or abs(s.capacity - setting.capacity) > NEAR * s.capacity
        )  # fmt: skip
        return replace(self, settings=(*others, setting))


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
    entry = _read(fingerprint).get(machine, {})
    try:
        return Known(
            tuple(Observed.from_json(run) for run in entry.get("runs", ())),
            tuple(Kept.from_json(setting) for setting in entry.get("settings", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
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
        found = json.loads(path_of(fingerprint).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return {}
    machines = found.get("machines") if found.get("version") == VERSION else None
    return machines if isinstance(machines, dict) else {}
