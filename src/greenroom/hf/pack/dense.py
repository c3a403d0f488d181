"""The dense parts of a pack: tensors copied as they are stored, into safetensors of their own.

The files are not called `model.safetensors`: no other program shall take a pack for a checkpoint
with all of its tensors, and make up experts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path

from greenroom.errors import CheckpointError, OutputError
from greenroom.hf.checkpoint.checkpoint import INDEX, Checkpoint
from greenroom.hf.checkpoint.header import DTYPES, Stored
from greenroom.hf.checkpoint.pack.format import HEADER, File

SHARD = 4 << 30  # bytes; a file that was not finished is copied anew
PIECE = 4 << 20
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*")  # config, tokenizer and the like
NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}

Advance = Callable[[int], None]


def dense_names(checkpoint: Checkpoint, used: Sequence[str]) -> list[str]:
    """The names in the files of the tensors that are `used`, with what belongs to them, such as
    scales; in the order in which they lie there."""
    names = set(used)
    stems = {name.rpartition(".")[0] for name in names}
    experts = {
        _place(part)
        for name, stored in checkpoint.tensors.items()
        if name not in names
        for part in (stored, *stored.companions)
    }
    chosen = [
        name
        for name, stored in checkpoint.stored.items()
        if name in names
        or (
            name not in checkpoint.tensors
            and name.rpartition(".")[0] in stems
            and _place(stored) not in experts
        )
    ]
    return sorted(chosen, key=lambda name: _place(checkpoint.stored[name]))


def _place(stored: Stored) -> tuple[int, int]:
    return stored.file, stored.offset


def shards(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, list[str]]:
    """File name -> the tensors that it is to have, none of the files much larger than SHARD."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = checkpoint.stored[name].nbytes
        if size and size + nbytes > SHARD:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return {
        f"dense-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def copy_safetensors(
    checkpoint: Checkpoint, names: Sequence[str], path: Path, advance: Advance
) -> File:
    """Write a safetensors file of these tensors; `advance(nbytes)` is told of what is written."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        stored = checkpoint.stored[name]
        begin, end = end, end + stored.nbytes
        entries[name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written(path, advance) as out:
        out(len(text).to_bytes(8, "little") + text)
        copy_bytes(checkpoint, [checkpoint.stored[name] for name in names], out)
    return out.file


def copy_bytes(
    checkpoint: Checkpoint, tensors: Sequence[Stored], out: Output, align: int = 1
) -> None:
    """Append the bytes of stored tensors, each begun at a multiple of `align` from here on."""
    start = out.nbytes
    for stored in tensors:
        out(b"\0" * (-(out.nbytes - start) % align))
        path, left = checkpoint.files[stored.file], stored.nbytes
        try:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(stored.offset)
                while left:
                    piece = stream.read(min(PIECE, left))
                    if not piece:
                        raise CheckpointError(f"{path}: truncated: it ends inside of a tensor")
                    out(piece)
                    left -= len(piece)
                os.posix_fadvise(
                    stream.fileno(), stored.offset, stored.nbytes, os.POSIX_FADV_DONTNEED
                )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class Output:
    """A file that is written from its beginning to its end, and its checksum."""

    def __init__(self, path: Path, stream: FileIO, advance: Advance) -> None:
        self.path, self._stream, self._advance = path, stream, advance
        self.nbytes = self.crc32 = 0

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._stream.write(view) :]
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.nbytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._advance(len(data))

    @property
    def file(self) -> File:
        """What the header says of it."""
        return File(self.path.name, self.nbytes, self.crc32)


@contextmanager
def written(path: Path, advance: Advance) -> Iterator[Output]:
    """A file that is on disk when this ends."""
    try:
        with open(path, "wb", buffering=0) as stream:
            yield Output(path, stream, advance)
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> OutputError:
    """The error for a file of a half-made pack."""
    return OutputError(
        f"{path}: cannot be written: {error.strerror}; what is packed so far is kept: the same"
        " command goes on"
    )


def copy_small(source: Path, target: Path) -> None:
    """Copy config, tokenizer and what else is small; not the index of the weights."""
    for path in sorted(source.iterdir()):
        small = any(fnmatch(path.name, pattern) for pattern in SMALL)
        if not small or path.name in (INDEX, HEADER) or not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        with written(target / path.name, lambda nbytes: None) as out:
            out(data)
