"""The header of a pack, greenroom.json; docs/pack-format.md describes the format.

A pack is a model in Greenroom's own format: its experts in one data file, `experts.greenroom`, and
all other tensors in ordinary files, the dense files. The header names the source checkpoint and the
dense files, and for each layer the position of its experts in the data file and the layout of one
expert. The header's `identity` is a digest of the header without checksums. The data file begins
with the same identity, so that the header of one pack is never used with the data of another.
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
FORMAT = "greenroom-pack"
# Versions of plain packs, packs with segments, with low-precision copies, and with some experts.
VERSION, SEGMENTED, COPIES, SUBSET = VERSIONS = 1, 2, 3, 4
KINDS = ("int8", "int4", "fp8", "bf12", "same")  # the choices of --experts


@dataclass(frozen=True, slots=True)
class DenseFile:
    """The name, size and CRC-32 of one of a pack's files of non-expert tensors."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class PackLayer:
    """The place and form of one layer's experts in a pack's data file.

    name:     the name of the experts module
    experts:  the number of experts
    offset:   the byte of the data file at which the first expert begins
    stride:   the bytes from one expert to the next, a multiple of 4096
    layout:   the tensors of one expert
    runs:     the byte ranges of an expert that have a checksum each
    crc32:    the checksums of all runs, expert by expert
    low_copy: the form of the low-precision copy at the beginning of each expert, if any
    subset:   the numbers of the experts in the complete model, ascending; empty if all are packed
    model_experts: the number of experts in the complete model; 0 if all are packed
    """

    name: str
    experts: int
    offset: int
    layout: SlotLayout
    crc32: tuple[int, ...] = ()
    low_copy: LowPrecisionCopy | None = None
    subset: tuple[int, ...] = ()
    model_experts: int = 0

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges of a packed expert that have a checksum each: (first byte, bytes).

        There is one for the expert, or one for each of its segments, or two: one for the
        low-precision copy and one for the bytes after it.
        """
        if self.low_copy is not None:
            stride = self.low_copy.stride
            return (0, stride), (stride, self.low_copy.remainder_bytes(self.layout))
        segments = self.layout.segments
        return tuple((s.offset, s.layout.nbytes) for s in segments) or ((0, self.layout.nbytes),)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a packed expert, with its low-precision copy, if any."""
        begin, length = self.runs[-1]
        return begin + length

    @property
    def stride(self) -> int:
        return -(-self.nbytes // BLOCK) * BLOCK

    def place(self, expert: int) -> int:
        """Return the byte of the pack's data file at which an expert begins."""
        return self.offset + expert * self.stride

    def checksums(self, expert: int) -> tuple[int, ...]:
        """Return an expert's checksums from a pack's header, one for each of its byte ranges."""
        runs = len(self.runs)
        return self.crc32[expert * runs : (expert + 1) * runs]

    def checksums_of(self, data: memoryview) -> tuple[int, ...]:
        """Compute the checksums of a packed expert: a CRC-32 for each of its byte ranges."""
        return tuple(zlib.crc32(data[begin : begin + length]) for begin, length in self.runs)


@dataclass(frozen=True, slots=True)
class PackSource:
    """The checkpoint that a pack was made from, and digests of it.

    model:       the checkpoint's folder, GGUF file or hub id
    fingerprint: the fingerprint of the complete checkpoint (`checkpoint.fingerprint`)
    dense:       the fingerprint of the pack's own config and non-expert tensors
    """

    model: str
    fingerprint: str
    dense: str


@dataclass(frozen=True, slots=True)
class PackHeader:
    """The content of a pack's header file, greenroom.json.

    kind:   the encoding of the experts: int8, int4, fp8, bf12, or same (as in the source)
    dtype:  the dtype in which the model computes
    source: the checkpoint that the pack was made from
    layers: the experts of each layer
    files:  the files of the non-expert tensors
    """

    kind: str
    dtype: str
    source: PackSource
    layers: tuple[PackLayer, ...]
    files: tuple[DenseFile, ...] = field(default=())

    @property
    def version(self) -> int:
        """The version of the pack format.

        4 if only some experts are packed, else 3 with low-precision copies, 2 with segments, or 1.
        """
        if self.layers[0].subset:
            return SUBSET
        if self.precision:
            return COPIES
        return SEGMENTED if any(layer.layout.segments for layer in self.layers) else VERSION

    @property
    def precision(self) -> str:
        """The precision of a pack's low-precision copies (int8 or int4); "" without copies."""
        low_copy = self.layers[0].low_copy
        return low_copy.precision if low_copy is not None else ""

    @property
    def segments(self) -> int:
        """Largest number of segments of an expert in a pack; 1 if experts are undivided."""
        return max(1, *(len(layer.layout.segments) for layer in self.layers))

    @property
    def nbytes(self) -> int:
        """Size of a pack's data file in bytes."""
        last = self.layers[-1]
        return last.place(last.experts)

    @property
    def experts(self) -> int:
        """The number of experts in all layers of a pack."""
        return sum(layer.experts for layer in self.layers)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The id of the first expert of each packed layer, then the number of experts."""
        return (0, *accumulate(layer.experts for layer in self.layers))

    def layer_of(self, expert_id: int) -> tuple[PackLayer, int]:
        """Return the packed layer of an expert id, and the expert's index in that layer."""
        for layer in self.layers:
            if expert_id < layer.experts:
                return layer, expert_id
            expert_id -= layer.experts
        raise IndexError(expert_id)

    @property
    def identity(self) -> str:
        """A SHA-256 digest of a pack's header without checksums and dense files, in hexadecimal."""
        bare = replace(self, files=(), layers=tuple(replace(x, crc32=()) for x in self.layers))
        return hashlib.sha256(json.dumps(_content(bare), sort_keys=True).encode()).hexdigest()

    def first_block(self) -> bytes:
        """Return the first 4096 bytes of a pack's data file: format, version and identity."""
        return f"{FORMAT} {self.version} {self.identity}\n".encode().ljust(BLOCK, b"\0")

    def with_checksums(self, crc32: Mapping[int, tuple[int, ...]]) -> PackHeader:
        """Return a copy of a pack's header with the given checksums of all experts.

        `crc32` maps an expert's id to the checksums of its byte ranges.
        """
        layers = tuple(
            replace(layer, crc32=tuple(c for e in range(layer.experts) for c in crc32[first + e]))
            for layer, first in zip(self.layers, self.offsets, strict=False)
        )
        return replace(self, layers=layers)

    def command(self, folder: Path, *more: str) -> str:
        """Return the `greenroom pack` command that makes this pack in a folder.

        `more` are further arguments, such as --repair.
        """
        arguments = [
            "greenroom",
            "pack",
            self.source.model,
            "-o",
            str(folder),
            "--experts",
            self.kind,
        ]
        if self.segments > 1:
            arguments += ["--segments", str(self.segments)]
        if self.precision:
            arguments += ["--miss-precision", self.precision]
        return shlex.join([*arguments, *more])

    def save(self, folder: Path) -> None:
        """Write a pack's header to greenroom.json in a folder, atomically.

        Raises OutputError if the file cannot be written.
        """
        text = json.dumps(as_json(self), indent=1)
        with atomic_file(folder / HEADER) as file:
            file.write(text.encode())


def as_json(header: PackHeader) -> dict[str, Any]:
    """Return a pack's header as the JSON object of greenroom.json."""
    return {**_content(header), "identity": header.identity}


def _content(header: PackHeader) -> dict[str, Any]:
    """Return a pack's header as a JSON object without `identity`, the header's digest."""
    return {
        "format": FORMAT,
        "version": header.version,
        "experts": header.kind,
        "dtype": header.dtype,
        "source": asdict(header.source),
        "dense": [asdict(file) for file in header.files],
        "data": {"name": DATA, "bytes": header.nbytes},
        "layers": [_layer(layer) for layer in header.layers],
    }


def _layer(layer: PackLayer) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": layer.name,
        "experts": layer.experts,
        "offset": layer.offset,
        "stride": layer.stride,
        **_layout(layer.layout),
    }
    if layer.layout.segments:
        entry["segments"] = [
            {"first": segment.first, "offset": segment.offset, **_tensors(segment.layout)}
            for segment in layer.layout.segments
        ]
    if (low_copy := layer.low_copy) is not None:
        entry["low"] = {
            "precision": low_copy.precision,
            "nested": low_copy.nested,
            **_layout(low_copy.layout),
        }
    if layer.subset:
        entry["subset"] = {"experts": list(layer.subset), "of": layer.model_experts}
    return {**entry, "crc32": list(layer.crc32)}


def _layout(layout: SlotLayout) -> dict[str, Any]:
    return {**_tensors(layout), "encodings": dict(layout.encodings)}


def _tensors(layout: SlotLayout) -> dict[str, Any]:
    return {"bytes": layout.nbytes, "tensors": [asdict(spec) for spec in layout.tensors]}


def lay_out(layers: Iterable[PackLayer]) -> tuple[PackLayer, ...]:
    """Set the byte offsets of a pack's layers, and return these layers.

    In the data file, layers follow one another after the first 4096 bytes.
    """
    placed: list[PackLayer] = []
    end = BLOCK
    for layer in layers:
        placed.append(replace(layer, offset=end))
        end = placed[-1].place(layer.experts)
    return tuple(placed)
