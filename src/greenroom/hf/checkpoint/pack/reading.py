"""Opening of a pack as a checkpoint, and checks of its files.

A pack is a model in Greenroom's own format: the experts are in one data file, all other tensors in
safetensors or GGUF files, the dense files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greenroom.errors import CheckpointError, NotAModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint, read_config
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.header import read_errors
from greenroom.hf.checkpoint.pack.catalog import catalog_of
from greenroom.hf.checkpoint.pack.format import BLOCK, DATA, HEADER, DenseFile, PackHeader
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.checkpoint.pack.journal import resume_command

CHUNK = 4 << 20  # bytes read at a time
UNFINISHED_SUFFIX = ".unfinished"  # of the folder of an unfinished pack


@dataclass(frozen=True, slots=True)
class Pack:
    """An opened pack: its folder and its header."""

    folder: Path
    header: PackHeader

    def find_damaged(self) -> Iterator[DenseFile | int]:
        """Read a whole pack; yield each dense file and expert id with a wrong checksum.

        A dense file, which holds non-expert tensors, is also yielded if it is missing.
        """
        for file in self.header.files:
            path = self.folder / file.name
            if not path.is_file() or crc32_of(path) != file.crc32:
                yield file
        with open(self.folder / DATA, "rb", buffering=0) as stream:
            for number in range(self.header.experts):
                layer, expert = self.header.layer_of(number)
                stream.seek(layer.place(expert))
                checksums = layer.checksums_of(memoryview(stream.read(layer.nbytes)))
                if checksums != layer.checksums(expert):
                    yield number
                os.posix_fadvise(
                    stream.fileno(), layer.place(expert), layer.stride, os.POSIX_FADV_DONTNEED
                )

    def check(self) -> None:
        """Read a whole pack and check all checksums.

        Raises CheckpointError with the first damaged file or expert, and the repair command.
        """
        for damaged in self.find_damaged():
            if isinstance(damaged, int):
                raise CheckpointError(catalog_of(self.header, self.folder).damage_message(damaged))
            raise CheckpointError(
                f"{self.folder / damaged.name}: this file is missing or damaged: to repair the"
                f" pack, run `{self.header.command(self.folder, '--repair')}`"
            )


def is_pack(folder: Path) -> bool:
    """True if a folder holds a pack, which means that it has the file greenroom.json."""
    return (folder / HEADER).is_file()


def open_pack(folder: Path) -> Checkpoint:
    """Open a pack as a checkpoint, by reading only headers.

    The checkpoint's tensors are those outside the experts; its `pack` describes the experts. Raises
    CheckpointError if a file is missing or damaged, or if files of different packs are mixed;
    UnsupportedModel for another version of the pack format.
    """
    header = read(folder)
    _check_data(folder, header)
    checkpoint = dense_parts(folder, header.files)
    if fingerprint(checkpoint) != header.source.dense:
        raise CheckpointError(
            f"{folder}: the pack's config or dense files were changed: they do not belong to its"
            f" experts, which were made from {header.source.model}: make the pack again"
        )
    return replace(checkpoint, pack=Pack(folder, header))


def dense_parts(folder: Path, files: Sequence[DenseFile]) -> Checkpoint:
    """Open a pack's config and non-expert tensors as a checkpoint.

    Raises CheckpointError if one of the files is missing, damaged or of another size.
    """
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise CheckpointError(
                f"{path}: this file is missing, though {HEADER} names it: run `greenroom pack` with"
                " --repair"
            )
        if path.stat().st_size != file.nbytes:
            raise CheckpointError(
                f"{path}: this file has {path.stat().st_size} bytes, but {HEADER} says"
                f" {file.nbytes}: run `greenroom pack` with --repair"
            )
    if files[0].name.endswith(".gguf"):
        return GgufCheckpoint.open(folder / files[0].name)
    return Checkpoint.of_files(folder, read_config(folder), [file.name for file in files], {})


def _check_data(folder: Path, header: PackHeader) -> None:
    path = folder / DATA
    with read_errors(path), open(path, "rb") as stream:
        first, size = stream.read(BLOCK), os.fstat(stream.fileno()).st_size
    if first != header.first_block():
        raise CheckpointError(
            f"{path}: this file does not belong to the pack of {HEADER}: make the pack again"
        )
    if size != header.nbytes:
        raise CheckpointError(
            f"{path}: this file has {size} bytes, but {HEADER} says {header.nbytes}: make the pack"
            " again"
        )


def refuse_unfinished(path: Path) -> None:
    """Raise NotAModel if a path is that of an unfinished pack.

    The message has the command that continues the pack.
    """
    for folder in (path, Path(f"{path}{UNFINISHED_SUFFIX}")):
        if (command := resume_command(folder)) is not None and (
            folder == path or not path.exists()
        ):
            raise NotAModel(f"{path}: this pack is not finished: run `{command}` to continue")


def crc32_of(path: Path) -> int:
    """Compute the CRC-32 of a file's content."""
    crc = 0
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(CHUNK):
            crc = zlib.crc32(piece, crc)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc
