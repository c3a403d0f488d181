"""The dense parts of a pack: tensors copied as they are stored, into safetensors of their own.

The files are not called `model.safetensors`: no other program shall take a pack for a checkpoint
with all of its tensors, and make up experts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from greenroom.errors import CheckpointError
from greenroom.hf.checkpoint.checkpoint import INDEX, Checkpoint
from greenroom.hf.checkpoint.header import DTYPES, Stored
from greenroom.hf.checkpoint.pack.format import HEADER, File
from greenroom.hf.checkpoint.pack.journal import KEPT, writing

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


def safetensors_of(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[bytes]:
    """A safetensors file of these tensors, piece by piece."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    tensors, end = [checkpoint.stored[name] for name in names], 0
    for name, stored in zip(names, tensors, strict=True):
        begin, end = end, end + stored.nbytes
        entries[name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from bytes_of(checkpoint, tensors)


def bytes_of(checkpoint: Checkpoint, tensors: Sequence[Stored], align: int = 1) -> Iterator[bytes]:
    """The bytes of stored tensors, each begun at a multiple of `align` from here on."""
    gap = 0
    for stored in tensors:
        yield b"\0" * gap
        path, left = checkpoint.files[stored.file], stored.nbytes
        try:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(stored.offset)
                while left:
                    piece = stream.read(min(PIECE, left))
                    if not piece:
                        raise CheckpointError(f"{path}: truncated: it ends inside of a tensor")
                    yield piece
                    left -= len(piece)
                os.posix_fadvise(
                    stream.fileno(), stored.offset, stored.nbytes, os.POSIX_FADV_DONTNEED
                )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        gap = -stored.nbytes % align


def write(path: Path, pieces: Iterable[bytes], advance: Advance) -> File:
    """Write a file, which is on disk when this returns; `advance(nbytes)` is told of each piece."""
    nbytes = crc32 = 0
    with writing(path, KEPT), open(path, "wb") as stream:
        for piece in pieces:
            stream.write(piece)
            nbytes += len(piece)
            crc32 = zlib.crc32(piece, crc32)
            advance(len(piece))
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return File(path.name, nbytes, crc32)


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
        write(target / path.name, [data], lambda nbytes: None)
