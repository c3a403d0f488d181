"""The headers of GGUF files, split files included: metadata and the byte range of each tensor.

Every length is compared with the rest of the file before anything of that length is read. Checked
are magic and version, types, that rows are complete blocks, and that every tensor lies inside of
its file.
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
    """Read the headers of a GGUF model: its file paths, metadata and tensors.

    Arrays of strings in the metadata are only counted.

    Tensors are by GGUF's names, shapes in torch's order; `StoredTensor.file` is an index of paths.
    Raises NotAModel, UnsupportedModel or CheckpointError.
    """
    paths = _parts(path)
    metadata, tensors = _header(paths[0], 0)
    if metadata.get("split.count", 1) not in (0, len(paths)):
        raise CheckpointError(
            f"{paths[0]}: its metadata says that the model has {metadata['split.count']} files, but"
            f" its name says {len(paths)}"
        )
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{paths[0]}: its metadata has no general.architecture")
    for number, part in enumerate(paths[1:], start=1):
        part_metadata, part_tensors = _header(part, number)
        if part_metadata.get("split.no", number) != number:
            raise CheckpointError(f"{part}: its number in the metadata is not the one in its name")
        tensors |= part_tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{path}: its files have {len(tensors)} tensors, not {expected}")
    return paths, metadata, tensors


def encoding_of(ggml: str) -> str:
    """Return Greenroom's encoding name for a ggml quantisation type.

    ggml's own name for types that no kernel reads.
    """
    name = ggml.lower()
    return next((each for each in (f"gguf_{name}", name) if each in BLOCKS), ggml)


def ggml_type(encoding: str) -> str:
    """Return ggml's type name for one of Greenroom's encodings, such as Q4_K."""
    return encoding.removeprefix("gguf_").upper()


def model_in(folder: Path) -> Path | None:
    """Find the only GGUF model in a folder; raise NotAModel where there are several."""
    models = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not path.name.startswith("mmproj")
        and ((part := PART.match(path.name)) is None or int(part["number"]) == 1)
    ]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5])
        raise NotAModel(f"{folder}: holds several GGUF models ({names}): give one of these files")
    if not models and (late := next(folder.glob("*.gguf"), None)):
        return late  # not the first file of a split model: opening it names the missing one
    return models[0] if models else None


def _parts(path: Path) -> tuple[Path, ...]:
    """Return the paths of all files of a (split) GGUF model, given one."""
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
                raise DamagedHeader(f"{printable(key)} is twice in its metadata")
            metadata[key] = value
        entries = [cursor.entry() for _ in range(cursor.tensors)]
        if len({name for name, *_ in entries}) < len(entries):
            raise DamagedHeader("two tensors have one name")
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= MOST_ALIGNMENT:
            raise DamagedHeader("its general.alignment is not a possible alignment")
    except DamagedHeader as error:
        raise CheckpointError(f"{path}: cut off or damaged in its header: {error}") from error
    data = -(-cursor.at // align) * align
    tensors = {
        name: _stored(path, number, name, shape, kind, data + offset)
        for name, shape, kind, offset in entries
    }
    check_ranges(path, tensors, size)
    return metadata, tensors


class DamagedHeader(ValueError):
    """Error for a GGUF header with values that cannot be right."""


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset


class Cursor:
    """A sequential reader of a GGUF file's header."""

    def __init__(self, path: str | Path) -> None:
        self._blob: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        self.at = 4
        self.version, self.tensors, self._pairs = self._take("IQQ")

    def pairs(self) -> Iterator[tuple[str, Any, bytes]]:
        """Yield each entry of a GGUF file's metadata: key, value and raw bytes."""
        for _ in range(self._pairs):
            begin = self.at
            key = self._text(LONGEST_NAME)
            value = self._value()
            yield key, value, bytes(self._blob[begin : self.at])

    def entry(self) -> _Entry:
        """Read the next tensor's name, shape, type and offset from a GGUF header.

        The shape is in torch's order.
        """
        name = self._text(LONGEST_NAME)
        (axes,) = self._take("I")
        if axes > MOST_AXES:
            raise DamagedHeader(f"{printable(name)} has {axes} axes")
        shape = self._take(f"{axes}Q")[::-1]
        if prod(max(n, 1) for n in shape) > INT64 // 64:
            raise DamagedHeader(f"{printable(name)} is larger than any tensor")
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _value(self) -> Any:
        (kind,) = self._take("I")
        if kind in NUMBERS:
            return self._take(NUMBERS[kind])[0]
        if kind == TEXT:
            return self._text(self._blob.size)
        if kind != ARRAY:
            raise DamagedHeader(f"its metadata has a value of the unknown type {kind}")
        kind, count = self._take("IQ")
        if kind in NUMBERS:
            return list(self._take(f"{count}{NUMBERS[kind]}"))
        if kind != TEXT:
            raise DamagedHeader(f"its metadata has an array of the unknown type {kind}")
        blob, at = self._blob.data, self.at
        try:
            for _ in range(count):  # a vocabulary: its strings are only counted
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
            raise DamagedHeader(f"it has a name or text of {length} bytes")
        (text,) = self._take(f"{length}s")
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedHeader("it has a name or text that is not UTF-8") from error

    def _take(self, form: str) -> tuple[Any, ...]:
        """Read the next values of a GGUF header, by a format of `struct`."""
        try:
            values = struct.unpack_from(f"<{form}", self._blob.data, self.at)
        except struct.error as error:
            raise self._cut_off() from error
        self.at += struct.calcsize(f"<{form}")
        return values

    def _cut_off(self) -> DamagedHeader:
        return DamagedHeader(f"it ends at byte {self._blob.size}, inside of its header")


def _stored(
    path: Path, file: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    check_name(path, name)
    try:
        ggml = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModel(
            f"{path}: {name} has the unknown type {kind}: a newer gguf package may know it"
        ) from error
    block, nbytes = GGML_QUANT_SIZES[ggml]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: {name} has rows of {shape[-1] if shape else 0} values, but {ggml.name} comes"
            f" in blocks of {block}"
        )
    size = prod(shape) // block * nbytes
    if ggml.name in DTYPES:  # ggml and safetensors have the same names
        return StoredTensor(file, DTYPES[ggml.name], shape, offset, size)
    codes = (*shape[:-1], shape[-1] // block * nbytes)
    return StoredTensor(file, "uint8", shape, offset, size, encoding_of(ggml.name), codes)
