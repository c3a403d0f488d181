"""The headers of GGUF files: metadata, and which tensor lies at which bytes; files in parts too.

Every length is held against what is left of the file before anything of it is read. Checked are
magic and version, types, rows that are whole blocks, and that every tensor lies inside of its file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.layout import BLOCKS
from greenroom.errors import CheckpointError, NotAModel, UnsupportedModel
from greenroom.hf.checkpoint.header import (
    DTYPES,
    MOST_AXES,
    StoredTensor,
    check_name,
    check_ranges,
    read_errors,
)
from greenroom.json_file import INT64, printable

VERSIONS = (2, 3)
# Type of a value in the metadata -> struct's letter.
NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
SIZE = struct.Struct("<Q")
LONGEST_NAME = 1 << 16  # bytes; the format's own limit for keys
MOST_ALIGNMENT = 1 << 20
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def read_gguf(path: Path) -> tuple[tuple[Path, ...], dict[str, Any], dict[str, StoredTensor]]:
    """The headers of a model's GGUF file, or of all parts that belong to it: (paths, metadata,
    tensors). Arrays of strings in the metadata are only counted.

    Tensors are by GGUF's names, shapes in torch's order; `StoredTensor.file` is an index of paths.
    Raises NotAModel, UnsupportedModel or CheckpointError.
    """
    paths = _parts(path)
    metadata, tensors = _header(paths[0], 0)
    if metadata.get("split.count", 1) not in (0, len(paths)):
        raise CheckpointError(
            f"{paths[0]}: says that it is one of {metadata['split.count']} parts, but its name"
            f" says {len(paths)}"
        )
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{paths[0]}: names no architecture in its metadata")
    for number, part in enumerate(paths[1:], start=1):
        found, more = _header(part, number)
        if found.get("split.no", number) != number:
            raise CheckpointError(f"{part}: is another part than its name says")
        tensors |= more
    wanted = metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(f"{path}: the parts have {len(tensors)} tensors, not {wanted}")
    return paths, metadata, tensors


def encoding_of(ggml: str) -> str:
    """The encoding of a type of ggml's; its own name where there is none, and no kernel reads it,
    though gguf can expand it."""
    name = ggml.lower()
    return next((each for each in (f"gguf_{name}", name) if each in BLOCKS), ggml)


def ggml_type(encoding: str) -> str:
    """The name of ggml's that an encoding of a GGUF file has."""
    return encoding.removeprefix("gguf_").upper()


def model_in(folder: Path) -> Path | None:
    """The only GGUF model of a folder; NotAModel where there are several."""
    found = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not path.name.startswith("mmproj")
        and ((part := PART.match(path.name)) is None or int(part["number"]) == 1)
    ]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise NotAModel(f"{folder}: holds several GGUF models ({names}): give one of these files")
    if not found and (late := next(folder.glob("*.gguf"), None)):
        return late  # a later part: its first one is missing
    return found[0] if found else None


def _parts(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to."""
    match = PART.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    paths = tuple(
        path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        for number in range(1, count + 1)
    )
    lost = [part for part in paths if not part.is_file()]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise CheckpointError(f"{lost[0]}: missing{more}: the model is split into {count} files")
    return paths


def _header(path: Path, number: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with read_errors(path), open(path, "rb") as stream:
        size = path.stat().st_size
        start = stream.read(24)
    if start[:4] != b"GGUF":
        raise NotAModel(f"{path}: not a GGUF file: it does not begin with GGUF")
    if len(start) < 24:
        raise CheckpointError(f"{path}: truncated: it ends inside of its header")
    (version,) = struct.unpack_from("<I", start, 4)
    if version not in VERSIONS:
        big = " (of a big-endian machine)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModel(f"{path}: GGUF version {version}{big}: versions 2 and 3 are read")
    metadata: dict[str, Any] = {}
    try:
        cursor = Cursor(path)
        for key, value, _ in cursor.pairs():
            if key in metadata:
                raise Damaged(f"{printable(key)} is twice in its metadata")
            metadata[key] = value
        entries = [cursor.entry() for _ in range(cursor.tensors)]
        if len({name for name, *_ in entries}) < len(entries):
            raise Damaged("two tensors have one name")
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= MOST_ALIGNMENT:
            raise Damaged("general.alignment is no alignment")
    except Damaged as error:
        raise CheckpointError(f"{path}: cut off or damaged in its header: {error}") from error
    data = -(-cursor.at // align) * align
    tensors = {
        name: _stored(path, number, name, shape, kind, data + offset)
        for name, shape, kind, offset in entries
    }
    check_ranges(path, tensors, size)
    return metadata, tensors


class Damaged(ValueError):
    """A header of a GGUF file cannot be right."""


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset


class Cursor:
    """Reads the header of a GGUF file from its beginning to its end."""

    def __init__(self, path: str | Path) -> None:
        self._blob: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        self.at = 4
        self.version, self.tensors, self._pairs = self._take("IQQ")

    def pairs(self) -> Iterator[tuple[str, Any, bytes]]:
        """Each key and value of the metadata, and both as they lie in the file."""
        for _ in range(self._pairs):
            begin = self.at
            key = self._text(LONGEST_NAME)
            value = self._value()
            yield key, value, bytes(self._blob[begin : self.at])

    def entry(self) -> _Entry:
        """A tensor; dimensions are in ggml's order, the fastest first."""
        name = self._text(LONGEST_NAME)
        (axes,) = self._take("I")
        if axes > MOST_AXES:
            raise Damaged(f"{printable(name)} has {axes} axes")
        shape = self._take(f"{axes}Q")[::-1]
        if prod(max(n, 1) for n in shape) > INT64 // 64:
            raise Damaged(f"{printable(name)} is larger than any tensor")
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _value(self) -> Any:
        (kind,) = self._take("I")
        if kind in NUMBERS:
            return self._take(NUMBERS[kind])[0]
        if kind == TEXT:
            return self._text(self._blob.size)
        if kind != ARRAY:
            raise Damaged(f"its metadata have a value of the type {kind}")
        kind, count = self._take("IQ")
        if kind in NUMBERS:
            return list(self._take(f"{count}{NUMBERS[kind]}"))
        if kind != TEXT:
            raise Damaged(f"its metadata have an array of the type {kind}")
        blob, at = self._blob.data, self.at
        try:
            for _ in range(count):  # a vocabulary: they are only counted
                at += 8 + SIZE.unpack_from(blob, at)[0]
        except (struct.error, OverflowError):
            at = INT64
        if at > len(blob):
            raise self._cut_off()
        self.at = at
        return count

    def _text(self, longest: int) -> str:
        (length,) = self._take("Q")
        if length > longest:
            raise Damaged(f"a name or text of {length} bytes")
        (text,) = self._take(f"{length}s")
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise Damaged("a name or text is not UTF-8") from error

    def _take(self, form: str) -> tuple[Any, ...]:
        """The next values, of struct's format."""
        try:
            found = struct.unpack_from(f"<{form}", self._blob.data, self.at)
        except struct.error as error:
            raise self._cut_off() from error
        self.at += struct.calcsize(f"<{form}")
        return found

    def _cut_off(self) -> Damaged:
        return Damaged(f"it ends at byte {self._blob.size}, inside of its header")


def _stored(
    path: Path, file: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    check_name(path, name)
    try:
        ggml = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModel(f"{path}: {name} is of the unknown type {kind}") from error
    block, nbytes = GGML_QUANT_SIZES[ggml]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: {name} has rows of {shape[-1] if shape else 0} values, but {ggml.name} comes"
            f" in blocks of {block}"
        )
    size = prod(shape) // block * nbytes
    if ggml.name in DTYPES:  # safetensors' names are ggml's too
        return StoredTensor(file, DTYPES[ggml.name], shape, offset, size)
    codes = (*shape[:-1], shape[-1] // block * nbytes)
    return StoredTensor(file, "uint8", shape, offset, size, encoding_of(ggml.name), codes)
