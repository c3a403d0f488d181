"""Reader of GGUF headers: metadata, and the byte range of each tensor.

A model may be split into several GGUF files. Files are untrusted: every length is compared with the
rest of the file before anything of that length is read. The reader checks magic, version and types,
that matrix rows consist of complete quantisation blocks, and that every tensor lies inside its
file.
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
# Arrays of the metadata that are parameters of a model: the constants of Qwen4's hash of n-grams.
PARAMETERS = re.compile(r"\.ple\.(layer_multipliers|head_offsets|head_vocab_sizes)$")
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def read_gguf(path: Path) -> tuple[tuple[Path, ...], dict[str, Any], dict[str, StoredTensor]]:
    """Read the headers of all files of a GGUF model: (paths, metadata, tensors).

    `path` is any file of the model. The metadata are those of the first file; an array of strings
    is replaced by its length. The tensors have GGUF's names and shapes in torch's order;
    `StoredTensor.file` is an index into the paths. Arrays of the metadata that are parameters of
    the model are among the tensors, by the names of their keys. Raises NotAModel if a file is no
    GGUF file, UnsupportedModel for another GGUF version or an unknown tensor type, CheckpointError
    if a file is missing or damaged.
    """
    paths = _part_paths(path)
    metadata, tensors = _read_header(paths[0], 0)
    if metadata.get("split.count", 1) not in (0, len(paths)):
        raise CheckpointError(
            f"{paths[0]}: the metadata of this file say that the model has"
            f" {metadata['split.count']} files, but the file's name says {len(paths)}: give the"
            " file its original name"
        )
    if "general.architecture" not in metadata:
        raise CheckpointError(
            f"{paths[0]}: damaged: the metadata of this file lack general.architecture: download"
            " the file again"
        )
    for number, part in enumerate(paths[1:], start=1):
        part_metadata, part_tensors = _read_header(part, number)
        _check_part(part, number, metadata, part_metadata)
        if twice := next((name for name in part_tensors if name in tensors), None):
            raise CheckpointError(
                f"{part}: the tensor {twice} is also in {paths[tensors[twice].file]}: these are"
                " parts of different models: download all files of the model again"
            )
        tensors |= part_tensors
    count = sum(name not in metadata for name in tensors)
    expected = metadata.get("split.tensors.count", count)
    if expected != count:
        raise CheckpointError(
            f"{path}: the model's files have {count} tensors, but the metadata say"
            f" {expected}: download all files of the model again"
        )
    return paths, metadata, tensors


def _check_part(part: Path, number: int, first: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Raise CheckpointError if a part of a model is another part, or of another model.

    `first` are the metadata of the model's first file, `metadata` those of this part.
    """
    if metadata.get("split.no", number) != number:
        raise CheckpointError(
            f"{part}: the metadata say that this is file {metadata['split.no']} of the"
            f" model, counted from 0, but the file's name says {number}: give the file its"
            " original name"
        )
    for key in ("split.count", "split.tensors.count"):
        mine, others = metadata.get(key), first.get(key)
        if None not in (mine, others) and mine != others:
            raise CheckpointError(
                f"{part}: a part of another model: its {key} is {printable(mine)}, but that of the"
                f" model's first file is {printable(others)}: download all files of the model again"
            )


def encoding_of(ggml: str) -> str:
    """Return Greenroom's name for a ggml quantisation type, such as q4_k for Q4_K.

    Types that Greenroom cannot decode keep ggml's name.
    """
    name = ggml.lower()
    return next((each for each in (f"gguf_{name}", name) if each in BLOCKS), ggml)


def ggml_type(encoding: str) -> str:
    """Return ggml's type name, such as Q4_K, for the name of a Greenroom encoding."""
    return encoding.removeprefix("gguf_").removesuffix("_scaled").upper()


def model_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder's only GGUF model; None if there is none.

    Of a model that is split into several files, this is the first file. Files called mmproj* are
    not counted. Raises NotAModel if the folder has several GGUF models.
    """
    models = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not path.name.startswith("mmproj")
        and ((part := PART.match(path.name)) is None or int(part["number"]) == 1)
    ]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5])
        more = f" and {len(models) - 5} more" if len(models) > 5 else ""
        raise NotAModel(
            f"{folder}: the folder holds several GGUF models ({names}{more}): give the path"
            " of one file"
        )
    if not models and (late := next(folder.glob("*.gguf"), None)):
        return late  # not the first file of a split model: opening it names the missing one
    return models[0] if models else None


def _part_paths(path: Path) -> tuple[Path, ...]:
    """Return the paths of all files of a GGUF model, given one of them.

    The others are in its folder or, if it is a symbolic link, in the folder to which it leads.
    """
    match = PART.match(path.name)
    if match is None:
        return (path,)
    count, linked = int(match["count"]), path.resolve().parent
    paths, lost = [], []
    for number in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        if not part.is_file():
            if not (linked / part.name).is_file():
                lost.append(part)
            part = linked / part.name
        paths.append(part)
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        where = "this folder" if linked == path.parent else f"this folder or in {linked}"
        raise CheckpointError(
            f"{lost[0]}: this file is missing{more}: the model is split into {count} files, which"
            f" must all be in {where}"
        )
    return tuple(paths)


def _read_header(path: Path, number: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    with read_errors(path), open(path, "rb") as stream:
        size = path.stat().st_size
        start = stream.read(24)
    if not start:
        raise CheckpointError(f"{path}: the file is empty: download it again")
    if start[:4] != b"GGUF":
        raise NotAModel(f"{path}: not a GGUF file: it does not begin with GGUF")
    if len(start) < 24:
        raise CheckpointError(
            f"{path}: truncated: the file ends inside its header: download the file again"
        )
    (version,) = struct.unpack_from("<I", start, 4)
    if version not in VERSIONS:
        big = " (perhaps a big-endian file)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModel(
            f"{path}: has GGUF version {version}{big}, but Greenroom reads only versions 2 and 3"
        )
    metadata: dict[str, Any] = {}
    parameters: dict[str, StoredTensor] = {}
    try:
        cursor = Cursor(path)
        for key, value, raw in cursor.pairs():
            if key in metadata:
                raise DamagedHeader(f"the metadata have the key {printable(key)} twice")
            metadata[key] = value
            if isinstance(value, list) and PARAMETERS.search(key):
                parameters[key] = _array(number, key, raw, cursor.at)
        entries = [cursor.entry() for _ in range(cursor.tensors)]
        if len({name for name, *_ in entries}) < len(entries):
            raise DamagedHeader("two tensors have the same name")
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= MOST_ALIGNMENT:
            raise DamagedHeader(
                f"general.alignment is {printable(align)}, but must be from 1 to {MOST_ALIGNMENT}"
            )
    except DamagedHeader as error:
        raise CheckpointError(
            f"{path}: the GGUF header is cut off or damaged: {error}: download the file again"
        ) from error
    data = -(-cursor.at // align) * align
    tensors = {
        name: _stored_tensor(path, number, name, shape, kind, data + offset)
        for name, shape, kind, offset in entries
    }
    check_ranges(path, tensors, size)
    return metadata, tensors | parameters


class DamagedHeader(ValueError):
    """Internal error for a GGUF header that is cut off or has impossible values."""


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset


class Cursor:
    """Sequential reader of a GGUF file's header: first the metadata, then the tensors.

    version: the GGUF version
    tensors: the number of tensors
    at:      the byte of the file that is read next
    """

    def __init__(self, path: str | Path) -> None:
        self._blob: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        self.at = 4
        self.version, self.tensors, self._pairs = self._take("IQQ")

    def pairs(self) -> Iterator[tuple[str, Any, bytes]]:
        """Yield each entry of a GGUF file's metadata: (key, value, raw bytes of the entry).

        The value of an array of strings is its length. Raises DamagedHeader.
        """
        for _ in range(self._pairs):
            begin = self.at
            key = self._text(LONGEST_NAME)
            value = self._value()
            yield key, value, bytes(self._blob[begin : self.at])

    def entry(self) -> _Entry:
        """Read the next tensor's name, shape, type and offset from a GGUF header.

        The shape is in torch's order, the type is ggml's number, and the offset counts bytes from
        the start of the tensor data. Raises DamagedHeader.
        """
        name = self._text(LONGEST_NAME)
        (axes,) = self._take("I")
        if axes > MOST_AXES:
            raise DamagedHeader(
                f"the tensor {printable(name)} has {axes} axes, but at most {MOST_AXES} are allowed"
            )
        shape = self._take(f"{axes}Q")[::-1]
        if prod(max(n, 1) for n in shape) > INT64 // 64:
            raise DamagedHeader(f"the tensor {printable(name)} has too many elements")
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _value(self) -> Any:
        (kind,) = self._take("I")
        if kind in NUMBERS:
            return self._take(NUMBERS[kind])[0]
        if kind == TEXT:
            return self._text(self._blob.size)
        if kind != ARRAY:
            raise DamagedHeader(f"the metadata have a value of the unknown type {kind}")
        kind, count = self._take("IQ")
        if kind in NUMBERS:
            return list(self._take(f"{count}{NUMBERS[kind]}"))
        if kind != TEXT:
            raise DamagedHeader(f"the metadata have an array of the unknown type {kind}")
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
            raise DamagedHeader(
                f"the header has a name or text of {length} bytes, but at most {longest} are"
                " allowed"
            )
        (text,) = self._take(f"{length}s")
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedHeader("the header has a name or text that is not UTF-8") from error

    def _take(self, form: str) -> tuple[Any, ...]:
        """Read the next values of a GGUF header, in a given format of Python's `struct`."""
        try:
            values = struct.unpack_from(f"<{form}", self._blob.data, self.at)
        except struct.error as error:
            raise self._cut_off() from error
        self.at += struct.calcsize(f"<{form}")
        return values

    def _cut_off(self) -> DamagedHeader:
        return DamagedHeader(f"the file ends at byte {self._blob.size}, inside its header")


def _array(file: int, key: str, raw: bytes, end: int) -> StoredTensor:
    """Return an array of whole numbers in a file's metadata as a tensor.

    `raw` is the entry of the metadata, which ends before byte `end` of the file.
    """
    begin = 12 + len(key.encode())
    kind, count = struct.unpack_from("<IQ", raw, begin)
    dtype, nbytes = np.dtype(NUMBERS[kind]), len(raw) - begin - 12
    if dtype.kind not in "iu":
        raise DamagedHeader(f"{key} must have whole numbers, but has the type {dtype.name}")
    return StoredTensor(file, dtype.name, (count,), end - nbytes, nbytes)


def _stored_tensor(
    path: Path, file: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    check_name(path, name)
    try:
        ggml = GGMLQuantizationType(kind)
    except ValueError as error:
        raise UnsupportedModel(
            f"{path}: the tensor {name} has the ggml type {kind}, which Greenroom does not know"
            " (forks such as ik_llama.cpp have types of their own): use another quantisation"
        ) from error
    block, nbytes = GGML_QUANT_SIZES[ggml]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: the tensor {name} has rows of {shape[-1] if shape else 0} values, but"
            f" {ggml.name} needs a multiple of {block}: download the file again"
        )
    size = prod(shape) // block * nbytes
    if ggml.name in DTYPES:  # ggml and safetensors have the same names
        return StoredTensor(file, DTYPES[ggml.name], shape, offset, size)
    codes = (*shape[:-1], shape[-1] // block * nbytes)
    return StoredTensor(file, "uint8", shape, offset, size, encoding_of(ggml.name), codes)
