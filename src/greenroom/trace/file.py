"""Traces on disk: our own file (see docs/trace-format.md), and the npz of published recordings."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.trace import container, journal
from greenroom.trace.container import Tensor
from greenroom.trace.metadata import FORMAT, VERSION, metadata, named
from greenroom.trace.trace import Experts, GateInputs, Prediction, Trace


def load(path: str | Path) -> Trace:
    """Read a trace: our own format, a journal of a recording that did not end, or an npz.

    Arrays of our own format stay in the file until they are used. TraceError, in one line, where
    the file is missing, damaged, of another version, or holds what cannot be.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
        if head[:2] == b"PK":
            return _checked(path, _read_npz)
        if head == journal.MAGIC:
            return _checked(path, journal.read)
        return _checked(path, _read)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise TraceError(f"{path}: cannot be read: {reason}{_unfinished(path)}") from error


def _unfinished(path: Path) -> str:
    grows = journal.journal_of(path)
    return f"; a recording that did not end is at {grows}" if grows.is_file() else ""


def _checked(path: Path, reader: Any) -> Trace:
    """Any error of the trace's own checks names the file."""
    try:
        trace: Trace = reader(path)
        return trace
    except TraceError as error:
        text = str(error)
        raise TraceError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace: beside, then renamed, so that it is there whole or not at all."""
    tensors: dict[str, NDArray[Any]] = {
        "experts": trace.experts,
        "experts_per_layer": trace.experts_per_layer,
        "request_starts": trace.request_starts,
        "pass_starts": trace.pass_starts,
        "pass_prefill": trace.pass_prefill,
    }
    tensors |= {
        name: array
        for name, array in (("weights", trace.weights), ("token_ids", trace.token_ids))
        if array is not None
    }
    if trace.gate_inputs is not None:
        tensors["gate_inputs.tokens"] = trace.gate_inputs.tokens
        tensors["gate_inputs.values"] = trace.gate_inputs.values
    for name, made in trace.predictions.items():
        tensors[f"predictions.{name}"] = made.experts
    names, labels = named(trace.labels)
    tensors["request_labels"] = labels
    container.write(
        Path(path),
        {name: Tensor(array.dtype, array.shape, [array]) for name, array in tensors.items()},
        metadata(names, trace.meta, {name: p.distance for name, p in trace.predictions.items()}),
    )


def _read(path: Path) -> Trace:
    arrays, text = container.read(path)
    if text.get("format") != FORMAT:
        raise TraceError(f"{path}: a safetensors file, but not a trace")
    if text.get("version") != str(VERSION):
        raise TraceError(
            f"{path}: a trace of version {text.get('version')}; this Greenroom reads {VERSION}"
        )
    try:
        names, distances = json.loads(text["labels"]), json.loads(text["predictions"])
        meta = json.loads(text["meta"])
        sampled = "gate_inputs.values" in arrays
        numbers = _typed(arrays, "request_labels", np.int32)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names):
            raise TraceError(f"{path}: its labels are damaged")
        return Trace(
            experts=_ids(arrays["experts"]),
            experts_per_layer=_typed(arrays, "experts_per_layer", np.int64),
            request_starts=_typed(arrays, "request_starts", np.int64),
            pass_starts=_typed(arrays, "pass_starts", np.int64),
            pass_prefill=_typed(arrays, "pass_prefill", np.bool_),
            labels=tuple(str(names[n]) for n in numbers.tolist()),
            weights=_typed(arrays, "weights", np.float16) if "weights" in arrays else None,
            token_ids=_typed(arrays, "token_ids", np.int32) if "token_ids" in arrays else None,
            gate_inputs=GateInputs(
                _typed(arrays, "gate_inputs.tokens", np.int64),
                _typed(arrays, "gate_inputs.values", np.float32),
            )
            if sampled
            else None,
            predictions={
                name: Prediction(_ids(arrays[f"predictions.{name}"]), int(distance))
                for name, distance in distances.items()
            },
            meta=dict(meta),
        )
    except KeyError as error:
        raise TraceError(f"{path}: damaged: it has no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: its metadata are damaged") from error


def _typed(arrays: dict[str, NDArray[Any]], name: str, kind: Any) -> NDArray[Any]:
    array = arrays[name]
    if array.dtype != kind:
        raise TraceError(f"{name} is {array.dtype}, but must be {np.dtype(kind)}")
    return array


def _ids(array: NDArray[Any]) -> Experts:
    """Expert ids as the smallest type that holds them; TraceError for what cannot be ids."""
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype.kind not in "iu":
        raise TraceError(f"experts are {array.dtype}, but ids are whole numbers")
    if array.size and (array.min() < 0 or array.max() >= 1 << 16):
        raise TraceError(f"an expert id lies outside 0 to {(1 << 16) - 1}")
    return array.astype(np.uint8 if not array.size or array.max() < 1 << 8 else np.uint16)


def _cast(arrays: dict[str, NDArray[Any]], name: str, kinds: str, dtype: Any) -> Any:
    """An array of an npz in our type, None where it is not there."""
    if name not in arrays:
        return None
    if arrays[name].dtype.kind not in kinds:
        raise TraceError(f"{name} are {arrays[name].dtype}, but must be {np.dtype(dtype)}")
    return arrays[name].astype(dtype)


def _read_npz(path: Path) -> Trace:
    """`experts`, `offsets` (of requests), `labels`, `phase`, `meta`; `weights`, `token_ids`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise TraceError(f"{path}: a damaged or truncated npz: {error}") from error
    missing = [n for n in ("experts", "offsets", "phase", "meta") if n not in arrays]
    if missing:
        raise TraceError(f"{path}: an npz without {', '.join(missing)}: not a routing trace")
    experts, starts = _ids(arrays["experts"]), _cast(arrays, "offsets", "iu", np.int64)
    try:
        meta = dict(json.loads(str(arrays["meta"])))
        most = np.array(meta["experts_per_layer"], np.int64)
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path}: its meta must be JSON with experts_per_layer") from error
    if experts.ndim != 3 or (most.ndim and most.shape != experts.shape[1:2]):
        raise TraceError(f"{path}: experts must be [tokens, layers, top_k], here {experts.shape}")
    phase = str(arrays["phase"])
    if phase not in ("decode", "prefill"):
        raise TraceError(f"{path}: phase must be decode or prefill, not {phase!r}")
    passes = starts if phase == "prefill" else np.arange(len(experts) + 1, dtype=np.int64)
    labels = arrays.get("labels", np.full(max(len(starts) - 1, 0), ""))
    return Trace(
        experts=experts,
        experts_per_layer=np.broadcast_to(most, experts.shape[1:2]).copy(),
        request_starts=starts,
        pass_starts=passes,
        pass_prefill=np.full(len(passes) - 1, phase == "prefill"),
        labels=tuple(str(label) for label in labels.tolist()),
        weights=_cast(arrays, "weights", "f", np.float16),
        token_ids=_cast(arrays, "token_ids", "iu", np.int32),
        meta=meta,
    )
