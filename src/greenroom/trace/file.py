"""Traces on disk: our own file (see docs/trace-format.md), and the npz of published recordings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.json_file import JsonObject, Malformed, each_of, parse, plain, text
from greenroom.trace import container, journal, npz, segments
from greenroom.trace.container import Tensor
from greenroom.trace.metadata import FORMAT, VERSION, checked_meta, metadata, named
from greenroom.trace.trace import GateInputs, Prediction, Trace, smallest_ids


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
            return _checked(path, npz.read)
        if head == segments.MAGIC:
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
    arrays, words = container.read(path)
    if words.get("format") != FORMAT:
        raise TraceError(f"{path}: a safetensors file, but not a trace")
    if words.get("version") != str(VERSION):
        raise TraceError(
            f"{path}: a trace of version {plain(words.get('version'))}; this Greenroom reads"
            f" {VERSION}"
        )
    try:
        names = each_of(text)(parse(words["labels"]), "labels")
        distances = JsonObject(parse(words["predictions"]))
        meta = checked_meta(JsonObject(parse(words["meta"])))
        sampled = "gate_inputs.values" in arrays
        numbers = _typed(arrays, "request_labels", np.int32)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names):
            raise TraceError(f"{path}: its labels are damaged")
        return Trace(
            experts=smallest_ids(arrays["experts"]),
            experts_per_layer=_typed(arrays, "experts_per_layer", np.int64),
            request_starts=_typed(arrays, "request_starts", np.int64),
            pass_starts=_typed(arrays, "pass_starts", np.int64),
            pass_prefill=_typed(arrays, "pass_prefill", np.bool_),
            labels=tuple(names[n] for n in numbers.tolist()),
            weights=_typed(arrays, "weights", np.float16) if "weights" in arrays else None,
            token_ids=_typed(arrays, "token_ids", np.int32) if "token_ids" in arrays else None,
            gate_inputs=GateInputs(
                _typed(arrays, "gate_inputs.tokens", np.int64),
                _typed(arrays, "gate_inputs.values", np.float32),
            )
            if sampled
            else None,
            predictions={
                name: Prediction(smallest_ids(arrays[f"predictions.{name}"]), distances.whole(name))
                for name in distances
            },
            meta=meta,
        )
    except KeyError as error:
        raise TraceError(f"{path}: damaged: it has no {error.args[0]}") from error
    except Malformed as error:
        raise TraceError(f"{path}: its metadata are damaged: {error}") from error


def _typed(arrays: dict[str, NDArray[Any]], name: str, kind: Any) -> NDArray[Any]:
    array = arrays[name]
    if array.dtype != kind:
        raise TraceError(f"{name} is {array.dtype}, but must be {np.dtype(kind)}")
    return array
