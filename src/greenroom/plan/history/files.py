"""Files of the history of a model's runs, and the file of a trained predictor.

A model has two history files in the user's cache folder, both named by the model's fingerprint. The
file in `learned/` holds arrays (`routing.py`), the file in `plans/` holds JSON with an entry for
each machine (`records.py`). Both can be deleted at any time. Files are written atomically. A
history file that is damaged, or of another format or version, is ignored until the next save
replaces it. With GREENROOM_LEARNED=off no history file is read or written. The user chooses the
path of a predictor's file.
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
LIMIT = 96 << 20  # bytes of arrays in a file of routing
RECORDS, RECORDS_VERSION = "greenroom-kept", 1
_OVERHEAD = 1 << 20  # most bytes of a header
_STALE_S = 3600.0  # age at which a draft is abandoned: its process died
_LOCK = threading.RLock()  # a process writes one draft of a file at a time

log = logging.getLogger(__name__)


class ArrayFormat(NamedTuple):
    """A format of safetensors files that carry a model's fingerprint.

    noun:    what such a file is called in messages
    name:    name of the format in the file's metadata
    version: the version of the format that is written and read
    remedy:  what the user can do about a file of another version
    """

    noun: str
    name: str
    version: int
    remedy: str

    def write(self, path: Path, arrays: Arrays, fingerprint: str, **metadata: str) -> None:
        """Write arrays and metadata to a safetensors file; raises OutputError if it cannot."""
        header = {"format": self.name, "version": str(self.version), "fingerprint": fingerprint}
        tensors = {name: Tensor(a.dtype, a.shape, [a]) for name, a in arrays.items()}
        container.write(path, tensors, header | metadata)

    def read(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Read a safetensors file of this format: (copies of its arrays, its metadata).

        PredictorError, in one line, if the file cannot be read, or is of another format or version.
        """
        try:
            arrays, metadata = container.read(path, self.noun, PredictorError)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise PredictorError(f"{path}: cannot be read: {reason}") from error
        if metadata.get("format") != self.name:
            raise PredictorError(
                f"{path}: the file is in the safetensors format, but is not a {self.noun}"
            )
        if metadata.get("version") != str(self.version):
            raise PredictorError(
                f"{path}: the {self.noun} has the format version"
                f" {printable(metadata.get('version'))}, but this Greenroom reads version"
                f" {self.version}: {self.remedy}"
            )
        return {name: np.array(array) for name, array in arrays.items()}, metadata


ROUTING = ArrayFormat("routing history", "greenroom-learned", 1, "the next run writes a new file")
PREDICTOR = ArrayFormat(
    "predictor", "greenroom.predictor", 2, "train it again with `greenroom train-predictor`"
)


def cache_folder() -> Path:
    """Return Greenroom's folder in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom"


def is_enabled() -> bool:
    """Check that runs may read and store history: GREENROOM_LEARNED is not off, 0, no or false."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def routing_path(fingerprint: str) -> Path:
    """Return the path of the file with a model's routing in earlier runs.

    ValueError for a fingerprint that cannot be part of a file's name.
    """
    return _path("learned", fingerprint, ".safetensors")


def records_path(fingerprint: str) -> Path:
    """Return the path of the file with a model's measurements and settings of earlier runs.

    ValueError for a fingerprint that cannot be part of a file's name.
    """
    return _path("plans", fingerprint, ".json")


def _path(folder: str, fingerprint: str, suffix: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]{0,127}", fingerprint):
        raise ValueError(
            f"{fingerprint!r} is not a model's fingerprint: use 1 to 128 letters, digits, dots,"
            " dashes and underscores"
        )
    return cache_folder() / folder / f"{fingerprint}{suffix}"


def load_routing(fingerprint: str) -> RoutingHistory | None:
    """Load the routing of a model's earlier runs.

    None if there is no file, if GREENROOM_LEARNED is off, or, with a warning, if the file cannot be
    used.
    """
    path = routing_path(fingerprint)
    if not is_enabled() or not path.exists():
        return None
    try:
        if path.stat().st_size > LIMIT + _OVERHEAD:
            raise ValueError("the file is larger than any that Greenroom writes")
        arrays, metadata = ROUTING.read(path)
        if metadata.get("fingerprint") != fingerprint:
            raise ValueError("the file is of another model")
        if metadata.get("crc32") != checksum(arrays):
            raise ValueError("the file is damaged: its checksum is wrong")
        return RoutingHistory.from_arrays(arrays)
    except (PredictorError, OSError, ValueError, KeyError) as error:
        reason = printable(str(error).removeprefix(f"{path}: ")) or type(error).__name__
        log.warning("the routing of earlier runs in %s is not used: %s", path, reason)
        return None


def save_routing(fingerprint: str, history: RoutingHistory) -> Path | None:
    """Store a model's routing for later runs, and return the file's path.

    Predictors' states that do not fit into LIMIT are left out, largest first. None if
    GREENROOM_LEARNED is off. OutputError if the file cannot be written, ValueError for a
    predictor's name with a slash.
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
    """Load what earlier runs of a model stored about a machine, by the machine's name.

    The records are empty if there is no usable file, or if GREENROOM_LEARNED is off.
    """
    return _records(_machines(fingerprint), machine)


def update_records(
    fingerprint: str, machine: str, change: Callable[[Records], Records]
) -> Path | None:
    """Change the stored records of a model on a machine; return the file's path.

    `change` gets the present records and returns the new ones; the file is not written if it
    returns its argument. None if GREENROOM_LEARNED is off. OutputError if the file cannot be
    written.
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
    """Load a model's stored records as JSON objects, by the name of the machine."""
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
    """Load the tensors of a predictor that was trained for the model with this fingerprint.

    PredictorError, in one line, if the file is missing, damaged, of another version, or of another
    model.
    """
    tensors, metadata = PREDICTOR.read(Path(path))
    if metadata.get("fingerprint") == fingerprint:
        return tensors
    try:
        model = JsonObject(parse(metadata.get("about", ""))).text("model")
    except Malformed:
        model = ""
    raise PredictorError(
        f"{path}: the predictor was trained for another model"
        f"{f' ({printable(model)})' if model else ''}: train one for this model with"
        " `greenroom train-predictor`"
    )


def save_predictor(path: Path, tensors: Arrays, fingerprint: str, about: Mapping[str, Any]) -> None:
    """Write the file of a predictor that was trained for the model with this fingerprint.

    `about` describes the training, and is stored as JSON in the metadata. OutputError if the file
    cannot be written.
    """
    PREDICTOR.write(path, tensors, fingerprint, about=json.dumps(about))


def checksum(arrays: Arrays) -> str:
    """Compute the CRC-32 of arrays' names, types, shapes and contents, in hexadecimal."""
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def _prepare(path: Path) -> None:
    """Make the folder of a file, and remove abandoned drafts of the file. OutputError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it tells of a user's prompts
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            if draft.stat().st_mtime < time.time() - _STALE_S:
                draft.unlink()
