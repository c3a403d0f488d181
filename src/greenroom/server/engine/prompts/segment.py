"""Segment files: keys and values of consecutive tokens of a prompt, as safetensors.

    ids              token ids, int32 [tokens]
    keys.I, values.I the keys and values of layer I, [heads, tokens, width], as computed

The metadata name the model (`key`), the segment before (`parent`), the first token's position
(`begin`), and the CRC-32 of the keys and values. A file's name ends in the digest of its header and
ids. So a file is used only if it has the content that it was written with, and a segment names the
bits that its own keys and values were computed from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.errors import GreenroomError
from greenroom.hf.checkpoint.header import DTYPES, NAMES
from greenroom.hf.kv.stored import Bytes, StoredBlock
from greenroom.json_file import JsonObject, Malformed, integer, parse
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.runtime.store.ranges import RangeReader
from greenroom.trace.container import METADATA, atomic_file

FORMAT, VERSION = "greenroom.prompt", "1"
MODE = 0o600  # prompts are private
MOST_HEADER = 1 << 20  # bytes
MOST_TOKENS = 1 << 16
# Parts of a file's name: the model, the first token's position, the digest; a draft has more.
NAME = re.compile(r"\.?([0-9a-f]{16})-(\d{8})-([0-9a-f]{32})\.safetensors(\.\d+\.tmp)?")


class DamagedSegment(GreenroomError):
    """A segment file whose content cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Description of one segment file of the prompt cache.

    key:    digest of the model and of all else that the bits of keys and values depend on
    parent: name digest of the segment before; for the first one, `root_of` the model's variant
    begin:  position of the segment's first token
    blocks: types and shapes of keys and values, of each layer in turn
    crc32:  of the keys and values, in hexadecimal
    """

    key: str
    parent: str
    begin: int
    ids: NDArray[np.int32]
    blocks: tuple[StoredBlock, ...]
    crc32: str

    @cached_property
    def header(self) -> bytes:
        """Return the file's header, with its length in front."""
        metadata = {
            "format": FORMAT, "version": VERSION, "key": self.key, "parent": self.parent,
            "begin": str(self.begin), "crc32": self.crc32,
        }  # fmt: skip
        header: dict[str, Any] = {METADATA: metadata, "ids": _entry("I32", [self.ids.size], 0, 4)}
        end = self.ids.nbytes
        for i, block in enumerate(self.blocks):
            shape = [block.heads, block.tokens, block.width]
            dtype = NAMES[str(block.dtype).removeprefix("torch.")]
            header[_name(i)] = _entry(dtype, shape, end, block.dtype.itemsize)
            end += block.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def name_digest(self) -> str:
        """Return the digest of header and ids, a part of the file's name."""
        digest = hashlib.blake2b(self.header, digest_size=16)
        digest.update(self.ids.tobytes())
        return digest.hexdigest()

    @property
    def file_name(self) -> str:
        return f"{self.key[:16]}-{self.begin:08d}-{self.name_digest}.safetensors"

    @cached_property
    def first_id(self) -> int:
        return int(self.ids[0])

    @property
    def end(self) -> int:
        return self.begin + self.ids.size

    @cached_property
    def data_bytes(self) -> int:
        """Return the number of bytes of keys and values."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.ids.nbytes + self.data_bytes

    def has_window_states(self, windows: Sequence[int]) -> bool:
        """Tell whether the segment is the last of a sequence whose window states it has."""
        return all(self.blocks[2 * i].tokens for i, window in enumerate(windows) if window)


def root_of(variant: int) -> str:
    """Return the parent of the first segments of a variant of the model.

    Variants share a model key, and no segments.
    """
    return f"variant {variant}" if variant else ""


def _name(index: int) -> str:
    """Return the name of a tensor of keys (even indices) or values (odd ones)."""
    return f"{('keys', 'values')[index % 2]}.{index // 2}"


def _entry(dtype: str, shape: list[int], begin: int, itemsize: int) -> dict[str, Any]:
    nbytes = itemsize
    for size in shape:
        nbytes *= size
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}


def checksum(data: Bytes) -> str:
    """Return the CRC-32 of a segment's keys and values, in hexadecimal."""
    return f"{zlib.crc32(data.data):08x}"


def write_segment(folder: Path, segment: Segment, data: Bytes) -> None:
    """Write a segment file, with its keys and values, beside its place and rename it.

    Raises OutputError if the file cannot be written.
    """
    with atomic_file(folder / segment.file_name, MODE) as file:
        file.write(segment.header)
        file.write(segment.ids.tobytes())
        file.write(data.data)


def read_segment(path: Path) -> Segment:
    """Read a segment file's header and ids, and check them against the file's name.

    Raises DamagedSegment if the file is not what its name says, OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 0 < length <= min(MOST_HEADER, size - 8):
            raise DamagedSegment("it is truncated, or no safetensors file")
        text = file.read(length)
        try:
            header = JsonObject(parse(text, MOST_HEADER))
            count = _shape(header, "ids", 1)[0]
            if not 0 < count <= MOST_TOKENS:
                raise Malformed(f"a segment has 1 to {MOST_TOKENS} tokens, not {count}")
            if len(data := file.read(4 * count)) < 4 * count:
                raise Malformed("the file ends inside the ids")
            segment = _described(header, np.frombuffer(data, np.int32))
            same = segment.header == prefix + text
        except Malformed as error:
            raise DamagedSegment(f"its header is damaged: {error}") from error
    if not same or path.name != segment.file_name:
        raise DamagedSegment("its header is not the one that was written")
    if size != segment.file_bytes:
        raise DamagedSegment(f"it has {size} bytes, not {segment.file_bytes}")
    return segment


def _described(header: JsonObject, ids: NDArray[np.int32]) -> Segment:
    """Make the Segment that a parsed header describes."""
    metadata = header.object(METADATA)
    begin = metadata.text("begin")
    if not (begin.isascii() and begin.isdigit() and len(begin) <= 8):
        raise Malformed("begin is no position")
    blocks = []
    for i in range(len(header.values) - 2):
        kind = header.object(_name(i)).text("dtype")
        if kind not in DTYPES or not hasattr(torch, DTYPES[kind]):
            raise Malformed("a tensor has an unknown type")
        heads, tokens, width = _shape(header, _name(i), 3)
        blocks.append(StoredBlock(getattr(torch, DTYPES[kind]), heads, tokens, width))
    return Segment(
        metadata.text("key"), metadata.text("parent"), int(begin), ids, tuple(blocks),
        metadata.text("crc32"),
    )  # fmt: skip


def _shape(header: JsonObject, name: str, axes: int) -> tuple[int, ...]:
    shape = header.object(name).list_of("shape", integer)
    if len(shape) != axes or max(shape) > 1 << 31:
        raise Malformed(f"{name} has a wrong shape")
    return shape


def read_data(path: Path, segment: Segment, into: Bytes, wait: Callable[[], None]) -> Bytes:
    """Read a segment's keys and values into a buffer; return the part that was filled.

    `wait` is called before each chunk of 4 MiB. Raises DamagedSegment if the bytes are not those
    that were written, OSError if the file cannot be read.
    """
    size, offset = segment.data_bytes, len(segment.header) + segment.ids.nbytes
    if size > into.size:
        raise DamagedSegment("it is larger than any that this model writes")
    with RangeReader(str(path), offset, size) as reader:
        for start in range(0, size, CHUNK_BYTES):
            wait()
            if not reader.fill(into[start : min(size, start + CHUNK_BYTES)]):
                raise DamagedSegment("it is truncated")
    if checksum(into[:size]) != segment.crc32:
        raise DamagedSegment("its checksum is wrong")
    return into[:size]
