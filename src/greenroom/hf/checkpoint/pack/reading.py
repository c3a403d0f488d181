"""A pack as a checkpoint: its dense parts as they were, its experts by a catalog of their own."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greenroom.errors import CheckpointError, NotAModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint, read_config
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.gguf import Gguf
from greenroom.hf.checkpoint.header import Stored, read_header
from greenroom.hf.checkpoint.pack.copies import catalog_of
from greenroom.hf.checkpoint.pack.format import BLOCK, DATA, HEADER, File, Header
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.checkpoint.pack.journal import unfinished
from greenroom.hf.checkpoint.pack.low import codes_of
from greenroom.hf.checkpoint.quantised import encoded

PIECE = 4 << 20  # bytes read at a time
BESIDE = ".unfinished"  # after a pack's name, while it is made


@dataclass(frozen=True, slots=True)
class Pack:
    """Where a pack is, and what its header says."""

    folder: Path
    header: Header

    def damaged(self) -> Iterator[str]:
        """A line for each expert, and each file of the dense parts, whose checksum is wrong."""
        for file in self.header.files:
            if crc32_of(self.folder / file.name) != file.crc32:
                mend = self.header.command(self.folder, "--repair")
                yield f"{self.folder / file.name}: damaged (its checksum is wrong): `{mend}`"
        catalog = catalog_of(self.header, self.folder, own_dtypes(self.header))
        with open(self.folder / DATA, "rb", buffering=0) as stream:
            wrong: set[int] = set()
            for piece in catalog.pieces:
                (extent,) = catalog.extents(piece)
                stream.seek(extent.offset)
                crc = zlib.crc32(stream.read(extent.length))
                expert = piece % catalog.experts
                if crc != catalog.checksum(piece) and expert not in wrong:
                    wrong.add(expert)
                    yield catalog.damaged(expert)
                os.posix_fadvise(
                    stream.fileno(), extent.offset, extent.length, os.POSIX_FADV_DONTNEED
                )


def own_dtypes(header: Header) -> list[dict[str, str]]:
    """For each layer its matrices' dtypes as stored, so that nothing is cast."""
    return [{spec.name: spec.dtype for spec in codes_of(layer.layout)} for layer in header.layers]


def is_pack(folder: Path) -> bool:
    """Whether a folder holds a pack."""
    return (folder / HEADER).is_file()


def open_pack(folder: Path) -> Checkpoint:
    """The dense parts as a checkpoint that knows its pack. Headers are read, no weights.

    CheckpointError where something is missing or damaged, or files of different packs are mixed;
    UnsupportedModel where the pack is of another version.
    """
    header = read(folder)
    _check_data(folder, header)
    checkpoint = dense_parts(folder, header.files)
    if fingerprint(checkpoint) != header.source.dense:
        raise CheckpointError(
            f"{folder}: its experts belong to another checkpoint than its config and dense parts"
            f" (the pack was made from {header.source.model})"
        )
    return replace(checkpoint, pack=Pack(folder, header))


def dense_parts(folder: Path, files: Sequence[File]) -> Checkpoint:
    """The checkpoint that a pack's dense files and its config are, without experts."""
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though {HEADER} names it")
        if path.stat().st_size != file.nbytes:
            raise CheckpointError(
                f"{path}: has {path.stat().st_size} bytes, but {HEADER} says {file.nbytes}"
            )
    if files[0].name.endswith(".gguf"):
        return Gguf.open(folder / files[0].name)
    config = read_config(folder)
    stored: dict[str, Stored] = {}
    for number, file in enumerate(files):
        stored |= read_header(folder / file.name, number)
    paths = tuple(str(folder / file.name) for file in files)
    return Checkpoint(folder, config, paths, encoded(config, stored, folder), stored)


def _check_data(folder: Path, header: Header) -> None:
    path = folder / DATA
    try:
        with open(path, "rb") as stream:
            first, size = stream.read(BLOCK), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if first != header.first_block():
        raise CheckpointError(f"{path}: is not the data of this pack: {HEADER} is another one's")
    if size != header.nbytes:
        raise CheckpointError(f"{path}: has {size} bytes, but {HEADER} says {header.nbytes}")


def refuse_unfinished(path: Path) -> None:
    """NotAModel, naming the command that continues it, where `path` is a half-made pack, or would
    be one when it is done."""
    for folder in (path, Path(f"{path}{BESIDE}")):
        if (command := unfinished(folder)) is not None and (folder == path or not path.exists()):
            raise NotAModel(f"{path}: a half-made pack: `{command}` goes on with it")


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file's content."""
    crc = 0
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(PIECE):
            crc = zlib.crc32(piece, crc)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc


def check_whole(checkpoint: Checkpoint) -> None:
    """CheckpointError, naming the first piece that is damaged and what mends it."""
    pack = checkpoint.pack
    if pack is not None and (said := next(pack.damaged(), None)):
        raise CheckpointError(said)
