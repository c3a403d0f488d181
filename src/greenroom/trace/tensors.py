"""Conversion of routing traces to and from the tensors and metadata of a trace file.

docs/trace-format.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import TraceError
from greenroom.json_file import JsonObject, Malformed, list_of, parse, printable, text
from greenroom.trace.container import Tensor
from greenroom.trace.trace import OPTIONAL, GateInputs, Prediction, Trace, smallest_ids

FORMAT = "greenroom.trace"
VERSIONS = ("1", "2")  # 2: with output norms; other traces are of version 1
PREDICTED = "predictions."  # before a predictor's name
OFFSETS = {"request_starts": np.int64, "pass_starts": np.int64, "pass_prefill": np.bool_}
TYPES: dict[str, Any] = {
    "experts_per_layer": np.int64,
    **OFFSETS,
    **OPTIONAL,
    "request_labels": np.int32,
    "gate_inputs.tokens": np.int64,
    "gate_inputs.values": np.float32,
}

Contents = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata


def number_labels(labels: Iterable[str]) -> tuple[list[str], NDArray[np.int32]]:
    """Number distinct labels by their first appearance.

    Returns (the distinct labels, for each given label its index among them).
    """
    numbers: dict[str, int] = {}
    numbered = [numbers.setdefault(label, len(numbers)) for label in labels]
    return list(numbers), np.array(numbered, np.int32)


def checked_meta(meta: JsonObject) -> dict[str, Any]:
    """Return the metadata of a routing recording.

    Raises Malformed if `expert_bytes` or `dense_bytes` is given, but is not a number.
    """
    for name in ("expert_bytes", "dense_bytes"):
        if meta.value(name, None) is not None:
            meta.number(name)
    return meta.values


def with_metadata(
    tensors: dict[str, Tensor],
    labels: Iterable[str],
    meta: Mapping[str, Any],
    distances: Mapping[str, int],
) -> Contents:
    """Complete the contents of a trace file: add the tensor of labels, and build the metadata.

    labels:    the label of each request
    meta:      information about the model and the run
    distances: for each predictor of experts, how many layers ahead it predicts

    Returns (tensors, metadata as text).
    """
    names, numbers = number_labels(labels)
    tensors["request_labels"] = Tensor.of(numbers)
    return tensors, {
        "format": FORMAT,
        "version": VERSIONS["output_norms" in tensors],
        "labels": json.dumps(names),
        "meta": json.dumps(meta),
        "predictions": json.dumps(distances),
    }


def to_tensors(trace: Trace) -> Contents:
    """Convert a routing trace to the tensors and metadata of a trace file."""
    arrays: dict[str, NDArray[Any] | None] = {
        name: getattr(trace, name) for name in ("experts", "experts_per_layer", *OFFSETS, *OPTIONAL)
    }
    if (sample := trace.gate_inputs) is not None:
        arrays |= {"gate_inputs.tokens": sample.tokens, "gate_inputs.values": sample.values}
    arrays |= {
        PREDICTED + name: prediction.experts for name, prediction in trace.predictions.items()
    }
    tensors = {name: Tensor.of(array) for name, array in arrays.items() if array is not None}
    distances = {name: prediction.distance for name, prediction in trace.predictions.items()}
    return with_metadata(tensors, trace.labels, trace.meta, distances)


def to_trace(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Trace:
    """Build a routing trace from the arrays and metadata of a trace file.

    `path` is named in messages. Raises TraceError if the file is no trace, is of another version,
    or has impossible contents.
    """
    if metadata.get("format") != FORMAT:
        raise TraceError(
            f"{path}: this safetensors file is not a trace: its metadata lack format {FORMAT}"
        )
    if metadata.get("version") not in VERSIONS:
        raise TraceError(
            f"{path}: this trace has format version {printable(metadata.get('version'))}, but this"
            f" Greenroom reads only versions {' and '.join(VERSIONS)}: record the trace again"
        )
    for name, kind in TYPES.items():
        if name in arrays and arrays[name].dtype != kind:
            raise TraceError(
                f"the array {name} has the dtype {arrays[name].dtype}, but must have"
                f" {np.dtype(kind)}"
            )
    try:
        names = list_of(text)(parse(metadata["labels"]), "labels")
        distances = JsonObject(parse(metadata["predictions"]))
        numbers = arrays["request_labels"]
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names):
            raise TraceError(
                f"{path}: damaged: request_labels must be numbers below {len(names)}, the number"
                " of labels"
            )
        sample = None
        if (values := arrays.get("gate_inputs.values")) is not None:
            sample = GateInputs(arrays["gate_inputs.tokens"], values)
        return Trace(
            experts=smallest_ids(arrays["experts"]),
            experts_per_layer=arrays["experts_per_layer"],
            **{name: arrays[name] for name in OFFSETS},
            **{name: arrays.get(name) for name in OPTIONAL},  # type: ignore[arg-type]
            labels=tuple(names[n] for n in numbers.tolist()),
            gate_inputs=sample,
            predictions={
                name: Prediction(smallest_ids(arrays[PREDICTED + name]), distances.integer(name))
                for name in distances
            },
            meta=checked_meta(JsonObject(parse(metadata["meta"]))),
        )
    except KeyError as error:
        raise TraceError(f"{path}: damaged: the trace has no {error.args[0]}") from error
    except Malformed as error:
        raise TraceError(f"{path}: the metadata of this trace are damaged: {error}") from error
