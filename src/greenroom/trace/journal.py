"""Journal: the file to which a recording of expert routing is appended.

If the process is killed, at most one segment, a few passes of a request, is lost. The module
`segments` describes the format.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import OutputError, TraceError
from greenroom.trace import container
from greenroom.trace.container import Tensor
from greenroom.trace.segments import (
    MAGIC,
    Header,
    NoHeader,
    Segment,
    pack_record,
    read_header,
    read_segments,
)
from greenroom.trace.tensors import Contents, to_trace, with_metadata
from greenroom.trace.trace import Trace, starts_of

# Arrays of a segment that have another name in the trace file.
_TITLES = {"sampled": "gate_inputs.tokens", "inputs": "gate_inputs.values"}


def journal_path(path: Path) -> Path:
    """Return the path of the journal of a recording that becomes the trace file `path`."""
    return path.with_name(path.name + ".journal")


class Journal:
    """Journal file of a recording of expert routing, to which segments are appended.

    An existing journal with an equal header is continued; an incomplete request at its end is
    dropped. `requests` and `tokens` count the complete requests that it had when it was opened, and
    their tokens. Raises TraceError if the file is damaged or is the journal of another recording,
    OutputError if it cannot be written or another process is writing to it.
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
            raise OutputError(
                f"{self.path}: another recording is writing to this file: wait until it ends, or"
                " record to another file"
            ) from error
        info = {"version": self.header.version, **asdict(self.header)}
        beginning = MAGIC + pack_record(info, b"")
        try:
            existing, end = read_header(self.path)
        except NoHeader:
            self._begin_anew(beginning)
            return
        if existing != self.header:
            raise TraceError(
                f"{self.path}: this journal is of another recording: convert it to a trace with"
                " `greenroom trace import`, or delete the file"
            )
        tokens = 0
        for segment, stop in read_segments(self.path, existing, end):
            tokens += segment.tokens
            if segment.last:
                self.requests, self.tokens, end = segment.request + 1, tokens, stop
        self._file.truncate(end)
        self._file.seek(end)

    def _begin_anew(self, beginning: bytes) -> None:
        """Write the header, also over one that a power cut has left incomplete."""
        content = self._file.read(len(beginning) + 1)
        if not beginning.startswith(content.rstrip(b"\0")):
            raise TraceError(
                f"{self.path}: this file is no recording's journal: rename it, or record to another"
                " file"
            )
        if os.fstat(self._file.fileno()).st_size:
            self._file.seek(0)
            self._file.truncate()
        self._write(beginning)
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def append(self, segment: Segment) -> None:
        """Append a segment to the journal; it survives a kill of this process."""
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
        self._write(pack_record(info, data))

    def _write(self, data: bytes) -> None:
        begin, left = self._file.tell(), memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):  # a record behind half a record would be lost
                self._file.truncate(begin)
                self._file.seek(begin)
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def finish(self, path: Path) -> None:
        """Convert the journal to a trace file, and delete the journal."""
        self._file.close()
        convert(self.path, path)
        os.unlink(self.path)

    def close(self) -> None:
        """Close the journal's file and leave it on disk."""
        self._file.close()


def convert(source: Path, path: Path) -> None:
    """Convert a recording's journal to a trace file, one segment at a time.

    Raises TraceError if the journal is damaged or has no tokens, OutputError if the trace file
    cannot be written.
    """
    container.write(path, *_contents(source))


def read(path: Path) -> Trace:
    """Read a trace from the complete segments of a recording's journal.

    Raises TraceError if the journal is damaged or has no tokens.
    """
    return _in_memory(path, _contents(path))


def trace_of_segments(header: Header, recorded: Iterable[Segment]) -> Trace:
    """Build a trace of expert routing from recorded segments in memory."""
    source = Path("recording")
    return _in_memory(source, contents(source, header, lambda: recorded))


def _in_memory(path: Path, contents: Contents) -> Trace:
    tensors, metadata = contents
    return to_trace(path, {name: tensor.array for name, tensor in tensors.items()}, metadata)


def _contents(path: Path) -> Contents:
    header, begin = read_header(path)
    return contents(path, header, lambda: (each for each, _ in read_segments(path, header, begin)))


def contents(path: Path, header: Header, read: Callable[[], Iterable[Segment]]) -> Contents:
    """Build the tensors and metadata of a trace file from a recording's segments.

    `read` returns the segments anew. It is called once at first, and once more whenever a tensor is
    written, so the arrays of only one segment are in memory. `path` is named in error messages.
    Raises TraceError if there are no tokens, or if the segments do not fit together.
    """
    lengths: dict[int, int] = {}
    labels: dict[int, str] = {}
    passes: list[tuple[int, bool]] = []
    sampled: list[NDArray[np.int64]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    tokens, complete = 0, True
    for segment in read():
        labels[segment.request] = segment.label
        lengths[segment.request] = lengths.get(segment.request, 0) + segment.tokens
        passes += segment.passes
        for name, array in segment.arrays.items():
            rows, *width = shapes.get(name, (0, *array.shape[1:]))
            if array.shape[1:] != tuple(width):
                raise TraceError(
                    f"{path}: damaged: the array {name} has shape {list(array.shape[1:])} for each"
                    f" token in one segment, but {width} in those before"
                )
            shapes[name] = rows + len(array), *width
        if "sampled" in segment.arrays:
            sampled.append(segment.arrays["sampled"] + tokens)
        tokens, complete = tokens + segment.tokens, segment.last
    if not tokens:
        raise TraceError(
            f"{path}: the recording ended before its first token, so there is no trace: delete the"
            " file"
        )
    tensors = {
        "experts_per_layer": Tensor.of(np.array(header.experts_per_layer, np.int64)),
        "request_starts": Tensor.of(starts_of(np.array(list(lengths.values())))),
        "pass_starts": Tensor.of(starts_of(np.array([n for n, _ in passes]))),
        "pass_prefill": Tensor.of(np.array([prefill for _, prefill in passes], np.bool_)),
    }
    for name, shape in shapes.items():
        parts = sampled if name == "sampled" else _parts(path, read, name, shape[0])
        tensors[_TITLES.get(name, name)] = Tensor(header.dtype(name), shape, parts)
    meta = header.meta if complete else {**header.meta, "last_request": "cut short"}
    return with_metadata(tensors, labels.values(), meta, header.predictions)


def _parts(
    path: Path, read: Callable[[], Iterable[Segment]], name: str, rows: int
) -> Iterator[NDArray[Any]]:
    for segment in read():
        yield segment.arrays[name]
        rows -= len(segment.arrays[name])
    if rows:
        raise TraceError(
            f"{path}: damaged: segments that could be read at first could not be read again"
        )
