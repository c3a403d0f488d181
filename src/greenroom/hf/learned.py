"""What runs learned of a model, kept for the next one (MoE-Infinity, appendix, failure recovery).

One safetensors file a model, named by its checkpoint's fingerprint, in the user's cache folder:
`hot`, `popularity` and `states/<predictor>/<array>`; its metadata hold format, version, fingerprint
and a checksum. It can be deleted at any time. One that is damaged, of another format or of a
version to come is left alone until the next save replaces it. GREENROOM_LEARNED=off keeps nothing,
and reads nothing.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from greenroom.core.scope import Scope, split_capacity
from greenroom.errors import OutputError
from greenroom.json_file import plain
from greenroom.trace.container import beside

FORMAT, VERSION = "greenroom-learned", 1
LIMIT = 64 << 20  # bytes of arrays in a file
SWITCH = "GREENROOM_LEARNED"
_OVERHEAD = 1 << 20  # what a header may add
_DRAFTS_S = 3600.0  # a draft that is older was left by a process that died
_SAVING = threading.Lock()  # a process has one draft of a file at a time

log = logging.getLogger(__name__)

Ids = NDArray[np.int64]
State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Learned:
    """Of a model with E experts in all, ids dense: what was resident at the end, dearest first
    [n]; how much each expert was asked for [E]; the predictors' states by name."""

    hot: Ids
    popularity: NDArray[np.float64]
    states: Mapping[str, State] = field(default_factory=dict)


def folder() -> Path:
    """Where it is kept: in the user's cache folder, beside the machine's profile."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "greenroom" / "learned"


def path_of(fingerprint: str) -> Path:
    """The file of a model. ValueError where its fingerprint cannot be a file's name."""
    if not re.fullmatch(r"\w[\w.-]{0,127}", fingerprint):
        raise ValueError(f"no fingerprint: {fingerprint!r}")
    return folder() / f"{fingerprint}.safetensors"


def switched_on() -> bool:
    """Whether anything is to be kept and read."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def load(fingerprint: str) -> Learned | None:
    """What was kept of a model; None where there is nothing, or nothing that can be used."""
    path = path_of(fingerprint)
    if not switched_on() or not path.exists():
        return None
    try:
        return _read(path, fingerprint)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        reason = plain(error) or type(error).__name__
        log.warning("%s is not used, and will be replaced: %s", path, reason)
        return None


def _read(path: Path, fingerprint: str) -> Learned:
    if path.stat().st_size > LIMIT + _OVERHEAD:
        raise ValueError("it is larger than anything that is kept")
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError("it was not written by Greenroom")
        if metadata.get("version") != str(VERSION):
            raise ValueError(f"version {metadata.get('version')}, this one reads {VERSION}")
        if metadata.get("fingerprint") != fingerprint:
            raise ValueError("it belongs to another model")
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("crc32") != _checksum(arrays):
        raise ValueError("it is damaged: its checksum is another")
    hot, popularity = arrays.pop("hot"), arrays.pop("popularity")
    if (hot.ndim, popularity.ndim) != (1, 1) or hot.dtype != np.int64:
        raise ValueError("its arrays are of another kind")
    states: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in arrays.items():
        _, predictor, own = name.split("/", 2)
        states.setdefault(predictor, {})[own] = array
    return Learned(hot, popularity.astype(np.float64), states)


def save(fingerprint: str, learned: Learned) -> Path | None:
    """Keep what was learned: written beside, then renamed. The file, or None where none was made.

    States that do not fit into LIMIT are left out, largest first. A folder that cannot be written
    is a warning: whoever saves has done its work. ValueError as `path_of`, and where a predictor's
    name has a slash.
    """
    path = path_of(fingerprint)
    arrays = _arrays(learned)
    if not switched_on():
        return None
    metadata = {"format": FORMAT, "version": str(VERSION), "fingerprint": fingerprint}
    metadata["crc32"] = _checksum(arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _SAVING:
            _sweep(path)
            with beside(path) as file:
                file.write(to_bytes(arrays, metadata))
    except (OSError, OutputError) as error:
        log.warning("what was learned of the model is not kept: %s", error)
        return None
    return path


def _arrays(learned: Learned) -> dict[str, NDArray[Any]]:
    """All arrays by their names in the file, without the states that are too large."""
    arrays: dict[str, NDArray[Any]] = {
        "hot": np.ascontiguousarray(learned.hot, np.int64),
        "popularity": np.ascontiguousarray(learned.popularity, np.float64),
    }
    left = LIMIT - sum(array.nbytes for array in arrays.values())
    sizes = {name: sum(a.nbytes for a in state.values()) for name, state in learned.states.items()}
    kept = sorted(sizes, key=sizes.__getitem__)
    while kept and sum(sizes[name] for name in kept) > left:
        largest = kept.pop()
        log.warning("the state of predictor %s is too large to be kept", largest)
    for name in kept:
        if "/" in name:
            raise ValueError(f"no predictor's name: {name!r}")
        state = learned.states[name].items()
        arrays |= {f"states/{name}/{own}": np.asarray(a, order="C") for own, a in state}
    return arrays


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def _sweep(path: Path) -> None:
    """Remove drafts of this file that nobody will finish."""
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            if draft.stat().st_mtime < time.time() - _DRAFTS_S:
                draft.unlink()


def hot_set(
    learned: Learned, offsets: Sequence[int], capacity: int, scope: Scope = "shared"
) -> Ids:
    """The experts to load at the start into `capacity` slots, dearest first, each once.

    `offsets` [L + 1] are the dense ids at which layers begin. First those that were resident at the
    end of the last run, then those that were asked for most; none that was never asked for. With
    scope `per-layer` no layer gets more than its share. What cannot be this model's is passed over.
    """
    groups = np.array(split_capacity(capacity, len(offsets) - 1, scope), np.int64)
    experts, popularity = int(offsets[-1]), learned.popularity
    if popularity.shape != (experts,) or not np.isfinite(popularity).all():
        return np.empty(0, np.int64)
    asked = np.argsort(-popularity, kind="stable")
    wanted = np.concatenate([learned.hot, asked[popularity[asked] > 0]])
    wanted = wanted[(wanted >= 0) & (wanted < experts)]
    _, firsts = np.unique(wanted, return_index=True)
    wanted = wanted[np.sort(firsts)]
    if scope == "shared":
        return wanted[:capacity]
    layer = np.searchsorted(offsets, wanted, "right") - 1
    earlier = np.array([np.count_nonzero(layer[:i] == each) for i, each in enumerate(layer)])
    return wanted[earlier < groups[layer]] if wanted.size else wanted
