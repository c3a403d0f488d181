"""A pack's header: what its files hold. The format is described in docs/pack-format.md.

greenroom.json names the checkpoint that the pack was made from, the files of the dense parts, and
for each layer where its experts lie in `experts.greenroom` and how one of them is laid out. Its
`identity` is a digest of all that but the checksums, and is repeated at the beginning of the data:
a header of one pack and the data of another do not go together.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from greenroom.core.layout import SlotLayout
from greenroom.hf.checkpoint.pack.copies import BLOCK, LowPrecisionCopy
from greenroom.trace.container import atomic_file

HEADER = "greenroom.json"
DATA = "experts.greenroom"
KIND = "greenroom-pack"
# Of packs; of those whose experts lie in segments; of those with low-precision copies.
VERSION, SEGMENTED, COPIES = VERSIONS = 1, 2, 3
KINDS = ("int8", "int4", "fp8", "same")  # what experts can be packed to


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A file of the dense parts: its size in bytes, and the CRC-32 of its content."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class PackLayer:
    """The experts of one layer: expert e lies at `offset + e * stride` of the data.

    stride: the `nbytes` of an expert, rounded up to whole blocks
    crc32:  of each expert; of each of its `runs`, where it has several
    low:    the copy that an expert begins with, if there is one
    """

    name: str
    experts: int
    offset: int
    layout: SlotLayout
    crc32: tuple[int, ...] = ()
    low_copy: LowPrecisionCopy | None = None

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first byte, bytes) of each run of an expert that has a checksum of its own."""
        if self.low_copy is not None:
            at = self.low_copy.stride
            return (0, at), (at, self.low_copy.remainder_bytes(self.layout))
        segments = self.layout.segments
        return tuple((s.offset, s.layout.nbytes) for s in segments) or ((0, self.layout.nbytes),)

    @property
    def nbytes(self) -> int:
        """Of an expert and its copy."""
        begin, length = self.runs[-1]
        return begin + length

    @property
    def stride(self) -> int:
        return -(-self.nbytes // BLOCK) * BLOCK

    def place(self, expert: int) -> int:
        """The byte at which an expert begins."""
        return self.offset + expert * self.stride

    def checksums(self, expert: int) -> tuple[int, ...]:
        """An expert's."""
        each = len(self.runs)
        return self.crc32[expert * each : (expert + 1) * each]

    def checksums_of(self, data: memoryview) -> tuple[int, ...]:
        """Those of an expert's bytes: one of each run."""
        return tuple(zlib.crc32(data[begin : begin + length]) for begin, length in self.runs)


@dataclass(frozen=True, slots=True)
class PackSource:
    """The checkpoint that a pack was made from: a folder, a file or a hub id, and its digests.

    fingerprint: of the whole checkpoint (hf/checkpoint/fingerprint.py)
    dense:       the same of its config and the dense tensors alone, which the pack has too
    """

    model: str
    fingerprint: str
    dense: str


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What greenroom.json says. `dtype` is what the model computes in."""

    kind: str
    dtype: str
    source: PackSource
    layers: tuple[PackLayer, ...]
    files: tuple[DenseFile, ...] = field(default=())

    @property
    def version(self) -> int:
        """Of the format that is needed to read it."""
        if self.precision:
            return COPIES
        return SEGMENTED if any(layer.layout.segments for layer in self.layers) else VERSION

    @property
    def precision(self) -> str:
        """That of the copies, "" where there are none."""
        low_copy = self.layers[0].low_copy
        return low_copy.precision if low_copy is not None else ""

    @property
    def segments(self) -> int:
        """The most that an expert lies in, 1 where it is whole."""
        return max(1, *(len(layer.layout.segments) for layer in self.layers))

    @property
    def nbytes(self) -> int:
        """Of the data file."""
        last = self.layers[-1]
        return last.place(last.experts)

    @property
    def experts(self) -> int:
        """How many experts there are over all layers."""
        return sum(layer.experts for layer in self.layers)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first expert's dense id of each layer, and the number of experts."""
        return (0, *accumulate(layer.experts for layer in self.layers))

    def layer_of(self, expert_id: int) -> tuple[PackLayer, int]:
        """(the layer, the expert's number in it)."""
        for layer in self.layers:
            if expert_id < layer.experts:
                return layer, expert_id
            expert_id -= layer.experts
        raise IndexError(expert_id)

    @property
    def identity(self) -> str:
        """64 hexadecimal digits; checksums have no part in it."""
        bare = replace(self, files=(), layers=tuple(replace(x, crc32=()) for x in self.layers))
        return hashlib.sha256(json.dumps(_content(bare), sort_keys=True).encode()).hexdigest()

    def first_block(self) -> bytes:
        """What the data file begins with."""
        return f"{KIND} {self.version} {self.identity}\n".encode().ljust(BLOCK, b"\0")

    def with_checksums(self, crc32: Mapping[int, tuple[int, ...]]) -> PackHeader:
        """The header of experts with these checksums, by their ids."""
        layers = tuple(
            replace(layer, crc32=tuple(c for e in range(layer.experts) for c in crc32[first + e]))
            for layer, first in zip(self.layers, self.offsets, strict=False)
        )
        return replace(self, layers=layers)

    def command(self, folder: Path, *more: str) -> str:
        """The command that makes this pack."""
        words = ["greenroom", "pack", self.source.model, "-o", str(folder), "--experts", self.kind]
        if self.segments > 1:
            words += ["--segments", str(self.segments)]
        if self.precision:
            words += ["--miss-precision", self.precision]
        return shlex.join([*words, *more])

    def save(self, folder: Path) -> None:
        """Write greenroom.json as a whole, or OutputError."""
        text = json.dumps(as_json(self), indent=1)
        with atomic_file(folder / HEADER) as file:
            file.write(text.encode())


def as_json(header: PackHeader) -> dict[str, Any]:
    """The header as it is written."""
    return {**_content(header), "identity": header.identity}


def _content(header: PackHeader) -> dict[str, Any]:
    """The header without its identity."""
    return {
        "format": KIND,
        "version": header.version,
        "experts": header.kind,
        "dtype": header.dtype,
        "source": asdict(header.source),
        "dense": [asdict(file) for file in header.files],
        "data": {"name": DATA, "bytes": header.nbytes},
        "layers": [_layer(layer) for layer in header.layers],
    }


def _layer(layer: PackLayer) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": layer.name,
        "experts": layer.experts,
        "offset": layer.offset,
        "stride": layer.stride,
        **_layout(layer.layout),
    }
    if layer.layout.segments:
        said["segments"] = [
            {"first": segment.first, "offset": segment.offset, **_tensors(segment.layout)}
            for segment in layer.layout.segments
        ]
    if (low_copy := layer.low_copy) is not None:
        said["low"] = {
            "precision": low_copy.precision,
            "nested": low_copy.nested,
            **_layout(low_copy.layout),
        }
    return {**said, "crc32": list(layer.crc32)}


def _layout(layout: SlotLayout) -> dict[str, Any]:
    return {**_tensors(layout), "encodings": dict(layout.encodings)}


def _tensors(layout: SlotLayout) -> dict[str, Any]:
    return {"bytes": layout.nbytes, "tensors": [asdict(spec) for spec in layout.tensors]}


def lay_out(layers: Iterable[PackLayer]) -> tuple[PackLayer, ...]:
    """The same layers, one after another in the data file."""
    made: list[PackLayer] = []
    end = BLOCK
    for layer in layers:
        made.append(replace(layer, offset=end))
        end = made[-1].place(layer.experts)
    return tuple(made)
