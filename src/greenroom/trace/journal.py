"""A recording while it grows: segments that are appended whole, so that a kill loses one at most.

The format is that of `segments`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import OutputError, TraceError
from greenroom.trace import container
from greenroom.trace.container import Tensor
from greenroom.trace.metadata import metadata, named
from greenroom.trace.segments import (
    MAGIC,
    PREDICTED,
    Header,
    Segment,
    as_json,
    packed,
    read_header,
    segments,
)
from greenroom.trace.trace import GateInputs, Prediction, Trace, starts_of


def journal_of(path: Path) -> Path:
    """Where a recording grows until it is whole."""
    return path.with_name(path.name + ".journal")


class Journal:
    """Appends segments to `path`. A new file, or one with the same header, which is gone on with.

    `requests` is how many requests are whole in it, and `tokens` theirs; what there was of a
    further one is dropped.
    TraceError where the file holds another recording, OutputError where one is under way in it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.requests = self.tokens = 0
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        except OSError as error:
            raise OutputError(f"{self.path}: another recording is writing to it") from error
        if not os.fstat(self._file.fileno()).st_size:
            self._write(MAGIC + packed(as_json(self.header), b""))
            return
        found, end = read_header(self.path)
        if as_json(found) != as_json(self.header):
            raise TraceError(
                f"{self.path}: holds another recording; finish it with `greenroom trace import`,"
                " or delete it"
            )
        tokens = 0
        for segment, stop in segments(self.path, found, end):
            tokens += segment.tokens
            if segment.last:
                self.requests, self.tokens, end = segment.request + 1, tokens, stop
        self._file.truncate(end)
        self._file.seek(end)

    def append(self, segment: Segment) -> None:
        """Add a segment; it is with the system when this returns, and outlives this process."""
        arrays, header = segment.arrays, self.header
        names = header.fields()
        info = {
            "request": segment.request,
            "label": segment.label,
            "passes": segment.passes,
            "last": segment.last,
            "shapes": [arrays[name].shape for name in names],
        }
        data = b"".join(arrays[name].astype(header.dtype(name)).tobytes() for name in names)
        self._write(packed(info, data))

    def _write(self, data: bytes) -> None:
        begin, left = self._file.tell(), memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):  # no half record: a later one would be lost behind it
                self._file.truncate(begin)
                self._file.seek(begin)
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def finish(self, path: Path) -> None:
        """Make the trace file of what was appended, a segment at a time, and remove the journal."""
        self._file.close()
        convert(self.path, path)
        os.unlink(self.path)

    def close(self) -> None:
        """Leave the journal as it is."""
        self._file.close()


def convert(source: Path, path: Path) -> None:
    """Write the trace file of a journal. Memory is that of one segment."""
    header, end = read_header(source)
    whole = _whole(source, header, end)
    names, labels = named(whole.labels)
    tensors = {name: _once(array) for name, array in whole.small.items()}
    tensors["request_labels"] = _once(labels)
    for name, title in zip(header.fields(), _titles(header), strict=True):
        if name != "sampled":
            parts = _parts(source, header, end, name)
            tensors[title] = Tensor(header.dtype(name), whole.shapes[name], parts)
    container.write(path, tensors, metadata(names, whole.meta, header.predictions))


def _parts(path: Path, header: Header, begin: int, name: str) -> Iterator[NDArray[Any]]:
    for segment, _ in segments(path, header, begin):
        yield segment.arrays[name]


def _once(array: NDArray[Any]) -> Tensor:
    return Tensor(array.dtype, array.shape, [array])


def _titles(header: Header) -> list[str]:
    """The names of a segment's arrays in the trace file."""
    titles = {"sampled": "gate_inputs.tokens", "inputs": "gate_inputs.values"}
    return [titles.get(name, name) for name in header.fields()]


def read(path: Path) -> Trace:
    """The trace of all whole segments; TraceError where there is none."""
    header, end = read_header(path)
    whole = _whole(path, header, end)
    found = [segment.arrays for segment, _ in segments(path, header, end)]
    arrays = {name: np.concatenate([part[name] for part in found]) for name in header.fields()}
    sample = None
    if "sampled" in arrays:
        sample = GateInputs(whole.small["gate_inputs.tokens"], arrays["inputs"])
    return Trace(
        experts=arrays["experts"],
        experts_per_layer=whole.small["experts_per_layer"],
        request_starts=whole.small["request_starts"],
        pass_starts=whole.small["pass_starts"],
        pass_prefill=whole.small["pass_prefill"],
        labels=tuple(whole.labels),
        weights=arrays.get("weights"),
        token_ids=arrays.get("token_ids"),
        gate_inputs=sample,
        predictions={
            name: Prediction(arrays[PREDICTED + name], distance)
            for name, distance in header.predictions.items()
        },
        meta=whole.meta,
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a trace needs beside the large arrays: the small ones, the large ones' shapes."""

    small: dict[str, NDArray[Any]]
    shapes: dict[str, tuple[int, ...]]
    labels: list[str]
    meta: dict[str, Any]


def _whole(path: Path, header: Header, end: int) -> _Whole:
    requests: dict[int, int] = {}
    labels: dict[int, str] = {}
    passes: list[tuple[int, bool]] = []
    sampled: list[NDArray[np.int64]] = []
    rows: dict[str, int] = dict.fromkeys(header.fields(), 0)
    tails: dict[str, tuple[int, ...]] = {}
    tokens, complete = 0, True
    for segment, _ in segments(path, header, end):
        labels[segment.request] = segment.label
        requests[segment.request] = requests.get(segment.request, 0) + segment.tokens
        passes += segment.passes
        for name, array in segment.arrays.items():
            rows[name] += len(array)
            if array.shape[1:] != tails.setdefault(name, array.shape[1:]):
                raise TraceError(f"{path}: damaged: {name} changes its shape on the way")
        if "sampled" in segment.arrays:
            sampled.append(segment.arrays["sampled"] + tokens)
        tokens, complete = tokens + segment.tokens, segment.last
    if not tokens:
        raise TraceError(f"{path}: nothing was recorded before the recording ended")
    small: dict[str, NDArray[Any]] = {
        "experts_per_layer": np.array(header.experts_per_layer, np.int64),
        "request_starts": starts_of(np.array(list(requests.values()))),
        "pass_starts": starts_of(np.array([n for n, _ in passes])),
        "pass_prefill": np.array([prefill for _, prefill in passes], np.bool_),
    }
    if sampled:
        small["gate_inputs.tokens"] = np.concatenate(sampled)
    shapes = {name: (rows[name], *tails[name]) for name in rows}
    meta = header.meta if complete else {**header.meta, "last_request": "cut short"}
    return _Whole(small, shapes, list(labels.values()), meta)
