"""Files of the history of runs, and the file of a trained predictor.

In the user's cache folder a model has two files, named by its fingerprint: `learned/` holds arrays
(`routing.py`), `plans/` holds JSON with an entry for each machine (`records.py`). Both can be
deleted at any time. Files are written atomically. A file that is damaged, of another format or of a
later version is ignored until the next save replaces it. With GREENROOM_LEARNED=off neither is read
or written. The user chooses the path of a predictor's file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from greenroom.errors import OutputError, PredictorError, UsageError
from greenroom.json_file import JsonObject, Malformed, parse, printable, read
from greenroom.plan.history.records import Records
from greenroom.plan.history.routing import Arrays, RoutingHistory
from greenroom.trace import container
from greenroom.trace.container import Tensor, atomic_file

SWITCH = "GREENROOM_LEARNED"
LIMIT = 64 << 20  # bytes of arrays in a file of routing
RECORDS, RECORDS_VERSION = "greenroom-kept", 1
_OVERHEAD = 1 << 20  # most bytes of a header
_STALE_S = 3600.0  # age at which a draft is abandoned: its process died
_LOCK = threading.RLock()  # a process writes one draft of a file at a time

log = logging.getLogger(__name__)


class ArrayFormat(NamedTuple):
    """A format of safetensors files with a model's fingerprint.

    PredictorError, in one line, where a file is not a `noun`, or of another version.
    """

    noun: str
    name: str
    version: int

    def write(self, path: Path, arrays: Arrays, fingerprint: str, **metadata: str) -> None:
        """Write arrays to a safetensors file. OutputError where it cannot be written."""
        header = {"format": self.name, "version": str(self.version), "fingerprint": fingerprint}
        tensors = {name: Tensor(a.dtype, a.shape, [a]) for name, a in arrays.items()}
        container.write(path, tensors, header | metadata)

    def read(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Read copies of a safetensors file's arrays, and the metadata."""
        try:
            arrays, metadata = container.read(path, self.noun, PredictorError)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise PredictorError(f"{path}: cannot be read: {reason}") from error
        if metadata.get("format") != self.name:
            raise PredictorError(f"{path}: a safetensors file, but not a {self.noun}")
        if metadata.get("version") != str(self.version):
            raise PredictorError(
                f"{path}: a {self.noun} of version {printable(metadata.get('version'))}; this"
                f" Greenroom reads {self.version}: delete it, or make it again"
            )
        return {name: np.array(array) for name, array in arrays.items()}, metadata


ROUTING = ArrayFormat("routing history", "greenroom-learned", 1)
PREDICTOR = ArrayFormat("predictor", "greenroom.predictor", 1)


def cache_folder() -> Path:
    """Return Greenroom's folder in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom"


def is_enabled() -> bool:
    """Check that the history of runs is enabled: GREENROOM_LEARNED is not off."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def routing_path(fingerprint: str) -> Path:
    """Return the path of a model's stored routing. ValueError for an impossible fingerprint."""
    return _path("learned", fingerprint, ".safetensors")


def records_path(fingerprint: str) -> Path:
    """Return the path of a model's stored records. ValueError for an impossible fingerprint."""
    return _path("plans", fingerprint, ".json")


def _path(folder: str, fingerprint: str, suffix: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]{0,127}", fingerprint):
        raise ValueError(f"no fingerprint: {fingerprint!r}")
    return cache_folder() / folder / f"{fingerprint}{suffix}"


def load_routing(fingerprint: str) -> RoutingHistory | None:
    """Load the routing of earlier runs; None, with a warning, for an unusable file."""
    path = routing_path(fingerprint)
    if not is_enabled() or not path.exists():
        return None
    try:
        if path.stat().st_size > LIMIT + _OVERHEAD:
            raise ValueError("it is larger than Greenroom writes them")
        arrays, metadata = ROUTING.read(path)
        if metadata.get("fingerprint") != fingerprint:
            raise ValueError("it belongs to another model")
        if metadata.get("crc32") != checksum(arrays):
            raise ValueError("it is damaged: its checksum is wrong")
        return RoutingHistory.from_arrays(arrays)
    except (PredictorError, OSError, ValueError, KeyError) as error:
        reason = printable(str(error).removeprefix(f"{path}: ")) or type(error).__name__
        log.warning("%s is not used, and will be replaced: %s", path, reason)
        return None


def save_routing(fingerprint: str, history: RoutingHistory) -> Path | None:
    """Store the routing for later runs; None where GREENROOM_LEARNED is off.

    Predictors' states that do not fit into LIMIT are left out, largest first. OutputError;
    ValueError for a predictor's name with a slash.
    """
    path, arrays = routing_path(fingerprint), history.arrays(LIMIT)
    if not is_enabled():
        return None
    crc32 = checksum(arrays)
    with _LOCK:
        _prepare(path)
        ROUTING.write(path, arrays, fingerprint, crc32=crc32)
    return path


def load_records(fingerprint: str, machine: str) -> Records:
    """Load a model's records on a named machine; empty for an unusable file."""
    return _records(_machines(fingerprint), machine)


def update_records(
    fingerprint: str, machine: str, change: Callable[[Records], Records]
) -> Path | None:
    """Change the stored records of a model on a machine; return the file's path.

    The file is not written where `change` returns its argument. None where GREENROOM_LEARNED is
    off. OutputError.
    """
    if not is_enabled():
        return None
    path = records_path(fingerprint)
    with _LOCK:
        machines = _machines(fingerprint)
        before = _records(machines, machine)
        if (after := change(before)) is before:
            return path
        machines[machine] = asdict(after)
        contents = {"format": RECORDS, "version": RECORDS_VERSION, "machines": machines}
        _prepare(path)
        with atomic_file(path) as file:
            file.write(json.dumps(contents, indent=1).encode())
    return path


def _records(machines: Mapping[str, Any], machine: str) -> Records:
    try:
        return Records.from_json(machines.get(machine, {}))
    except (Malformed, UsageError):
        return Records()


def _machines(fingerprint: str) -> dict[str, Any]:
    """Load a model's records on all machines."""
    if not is_enabled():
        return {}
    try:
        contents = read(records_path(fingerprint))
    except (OSError, Malformed):
        return {}
    if not isinstance(contents, dict) or contents.get("format") != RECORDS:
        return {}
    machines = contents.get("machines") if contents.get("version") == RECORDS_VERSION else None
    return machines if isinstance(machines, dict) else {}


def load_predictor(path: str | os.PathLike[str], fingerprint: str) -> Arrays:
    """Load the tensors of a predictor that was trained for this model.

    PredictorError, in one line, where the file is missing, damaged, of another version, or of
    another model.
    """
    tensors, metadata = PREDICTOR.read(Path(path))
    if metadata.get("fingerprint") == fingerprint:
        return tensors
    try:
        model = JsonObject(parse(metadata.get("about", ""))).text("model")
    except Malformed:
        model = ""
    raise PredictorError(
        f"{path}: was trained for another model{f' ({printable(model)})' if model else ''}: train"
        " one for this model with `greenroom train-predictor`"
    )


def save_predictor(path: Path, tensors: Arrays, fingerprint: str, about: Mapping[str, Any]) -> None:
    """Write a trained predictor's file, with its description `about` as JSON. OutputError."""
    PREDICTOR.write(path, tensors, fingerprint, about=json.dumps(about))


def checksum(arrays: Arrays) -> str:
    """Compute the CRC-32 of names, types, shapes and contents of arrays."""
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def _prepare(path: Path) -> None:
    """Make the file's folder, and remove abandoned drafts of the file. OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            if draft.stat().st_mtime < time.time() - _STALE_S:
                draft.unlink()
