"""Make a pack of a model: expert by expert, in bounded memory, with continuation after a kill.

A pack is a model in Greenroom's own file format. It grows in a folder NAME.unfinished, which is
renamed when the pack is complete on disk. Threads read experts, encode them and write them to
positions that are computed beforehand. A journal lists the experts that have been synced to disk; a
killed process loses only the experts after the last sync.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greenroom.config import show_bytes
from greenroom.errors import OutputError, UnknownName, UsageError
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.pack.copies import PRECISIONS
from greenroom.hf.checkpoint.pack.format import (
    DATA,
    KINDS,
    DenseFile,
    PackHeader,
    PackLayer,
    PackSource,
    lay_out,
)
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.checkpoint.pack.journal import NAME as JOURNAL
from greenroom.hf.checkpoint.pack.journal import Journal, PackProgress, write_errors
from greenroom.hf.checkpoint.pack.reading import UNFINISHED_SUFFIX, Pack, dense_parts, is_pack
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack import dense
from greenroom.hf.pack.subset import Keep, packed_skeleton
from greenroom.hf.pack.target import ExpertPacker, low_copy_of, target_layout
from greenroom.hf.pack.workers import ExpertsFile, write_experts
from greenroom.json_file import one_line
from greenroom.runtime.memory.system import peak_rss_bytes
from greenroom.runtime.slots.cutting import Cutting

SYNC_BYTES, SYNC_S = 256 << 20, 1.0  # a sync after so much: the work that a kill may lose
MARGIN = 16 << 20  # bytes for the header, the journal and the file system

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PackResult:
    """Sizes, counts and times of one call that made, continued or repaired a pack.

    folder:              the pack's folder
    nbytes:              bytes of all files of the pack
    expert_bytes:        bytes of all packed experts, without low-precision copies
    source_expert_bytes: bytes of all experts of the source model, in memory
    experts:             the number of experts of the model
    unchanged:           how many experts an earlier call had packed, or a repair found undamaged
    seconds:             the duration of the call
    peak_rss_bytes:      peak resident memory of this process
    copy_bytes:          bytes that low-precision copies add; 0 if copies are nested in experts
    """

    folder: Path
    nbytes: int
    expert_bytes: int
    source_expert_bytes: int
    experts: int
    unchanged: int
    seconds: float
    peak_rss_bytes: int
    copy_bytes: int = 0


def pack(
    source: str,
    out: str | os.PathLike[str],
    kind: str,
    *,
    segments: int = 1,
    precision: str | None = None,
    keep: Keep | None = None,
    repair: bool = False,
    config: str | None = None,
    progress: Progress = lambda done, total: None,
) -> PackResult:
    """Make the pack of a model: a copy in Greenroom's own file format, with re-encoded experts.

    source:    the model's folder, GGUF file or hub id
    out:       the pack's folder
    kind:      the experts' encoding: int8, int4, fp8, bf12, or same (as in the source)
    segments:  into how many segments along the intermediate dimension each expert is divided
    precision: int8 or int4 adds a low-precision copy of each expert, which may replace the expert
               when it is not in memory
    keep:      which experts are packed; None: all
    repair:    True replaces the damaged files and experts of an existing pack
    config:    folder, file or hub id with the config of a GGUF file
    progress:  called with (bytes done, bytes in total)

    An unfinished pack of an earlier, equal call is continued. Raises a GreenroomError; after an
    OutputError or KeyboardInterrupt the same call continues the pack.
    """
    if kind not in KINDS:
        raise UnknownName("kind of experts", kind, KINDS)
    if segments < 1:
        raise UsageError(f"--segments must be at least 1, got {segments}")
    if precision is not None and precision not in PRECISIONS:
        raise UnknownName("miss precision", precision, PRECISIONS)
    if precision is not None and segments > 1:
        raise UsageError(
            f"--segments {segments} and --miss-precision {precision} exclude each other: leave out"
            " one of them"
        )
    began, folder = time.perf_counter(), Path(os.path.abspath(Path(out).expanduser()))
    checkpoint = find_checkpoint(source, config)
    is_file = isinstance(checkpoint, GgufCheckpoint)
    inside = checkpoint.folder.parent if is_file else checkpoint.folder
    if not repair and folder.resolve() == inside.resolve():
        raise UsageError(
            f"{folder}: the pack cannot go to the model's own folder: name another folder with -o"
        )
    skeleton = packed_skeleton(checkpoint, keep, folder if repair else None)
    job = _Job(skeleton, _source_name(source), kind, segments, precision, progress)
    job.more = keep.arguments if keep is not None else ()
    packed = job.repair(folder) if repair else job.make(folder)
    layers, experts = job.header.layers, job.header.experts
    target = sum(layer.experts * layer.layout.nbytes for layer in layers)
    added = sum(
        x.experts * x.low_copy.stride for x in layers if x.low_copy and not x.low_copy.nested
    )
    return PackResult(
        folder, _folder_bytes(folder), target, job.catalog.all_experts_bytes, experts,
        experts - packed, time.perf_counter() - began, peak_rss_bytes(), added,
    )  # fmt: skip


def _source_name(source: str) -> str:
    """Return the name of a pack's source model: an absolute path, a hub id, or demo."""
    path = Path(source).expanduser()
    return os.path.abspath(path) if source != "demo" and path.exists() else source


@dataclass
class _Job:
    """The packing of one model: its plan, and the work.

    model:  the name of the source model
    kind:   the encoding of the packed experts
    header: the header of the pack, without checksums
    done:   bytes that have been written
    total:  bytes to write
    """

    skeleton: ModelSkeleton
    model: str
    kind: str
    segments: int
    precision: str | None
    progress: Progress
    done: int = 0  # bytes
    more: tuple[str, ...] = ()  # further arguments of the command

    def __post_init__(self) -> None:
        self.checkpoint, self.catalog = self.skeleton.checkpoint, self.skeleton.catalog
        pack = self.checkpoint.pack
        cut = any(layout.segments for layout in self.catalog.layouts)
        if cut or (pack is not None and pack.header.precision):
            what = "segments" if cut else "low-precision copies"
            source_model = pack.header.source.model if pack is not None else "its source"
            raise UsageError(
                f"{self.model}: this is a pack with {what}, which cannot be packed again: pack"
                f" {source_model} instead"
            )
        planned = [self._plan_layer(number) for number in range(len(self.catalog.layers))]
        self.packers = [packers for _, packers in planned]
        source = PackSource(one_line(self.model), fingerprint(self.checkpoint), "")
        layers = lay_out(layer for layer, _ in planned)
        self.header = PackHeader(self.kind, str(self.skeleton.dtype)[6:], source, layers)
        names = dense.dense_names(self.checkpoint, self.skeleton.dense_tensors)
        self.shards = dense.shards(self.checkpoint, names)
        stored = self.checkpoint.stored
        self.total = self.header.nbytes + sum(stored[name].nbytes for name in names)

    def _plan_layer(self, number: int) -> tuple[PackLayer, tuple[ExpertPacker, ...]]:
        """Plan how one layer's experts and low-precision copies are laid out and encoded."""
        name, source = self.catalog.layers[number], self.catalog.layouts[number]
        first, end = self.catalog.offsets[number : number + 2]
        module = self.skeleton.model.get_submodule(name)
        target, cutting, low_copy = target_layout(self.kind, source, module, name), None, None
        if self.segments > 1:
            if self.kind == "bf12":
                raise UsageError(
                    "--experts bf12 and --segments exclude each other: leave out one of them"
                )
            cutting = Cutting.of(module, target)
            target = cutting.segments(self.segments, name)
        packer = ExpertPacker(self.kind, source, target, bool(module.is_transposed), name, cutting)
        packers: tuple[ExpertPacker, ...] = (packer,)
        if self.precision is not None:
            low_copy = low_copy_of(self.precision, self.kind, source, target, module, name)
            packers = packer.with_copies(low_copy)
        layer = PackLayer(name, end - first, 0, target, low_copy=low_copy)
        if (subset := self.skeleton.subset) is not None:
            of = subset.model_experts[number]
            layer = replace(layer, subset=subset.experts[number], model_experts=of)
        return layer, packers

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(min(self.done, self.total), self.total)

    # ---- packing

    def make(self, folder: Path) -> int:
        """Make or continue a pack in a folder; return the number of experts that were packed."""
        more = "name another folder with -o"
        repair = f"it holds a pack: give --repair to repair the pack, or {more}"
        _check_free(folder, repair if is_pack(folder) else more)
        if not folder.parent.is_dir():
            raise OutputError(
                f"{folder}: the pack cannot be made here: there is no folder {folder.parent}"
            )
        work = folder.with_name(folder.name + UNFINISHED_SUFFIX)
        self._check_room(work)
        with write_errors(work):
            work.mkdir(exist_ok=True)
        begun, packed = (work / JOURNAL).exists(), 0
        if not begun and is_pack(work):  # the pack is complete, but for its name
            self._check_same(read(work), work)
        elif not begun and any(work.iterdir()):
            raise OutputError(
                f"{work}: this folder is not empty and holds no unfinished pack, but the pack is"
                " made in a folder of this name: delete or rename the folder"
            )
        else:
            with closing(
                Journal(work, self._plan(), self.header.command(folder, *self.more))
            ) as journal:
                dense.copy_small(self.checkpoint, work)
                packed = self._fill(work, journal, self.header.source)
                with write_errors(work):
                    _sync_folder(work)  # the header's name is certain before the journal goes
                journal.remove()
        with write_errors(folder):
            _sync_folder(work)  # nor is a journal ever in a pack that has its own name
            os.rename(work, folder)
            _sync_folder(folder.parent)
        return packed

    def _plan(self) -> dict[str, Any]:
        """Return the values that must be equal for an unfinished pack to be continued."""
        files = sorted({*self.checkpoint.files, *self.catalog.files})
        stats = [(path, os.stat(path)) for path in files]
        return {
            "version": self.header.version,
            "identity": self.header.identity,
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        }

    def _check_same(self, header: PackHeader, folder: Path) -> None:
        source = replace(header.source, fingerprint=self.header.source.fingerprint)
        if replace(self.header, source=source).identity != header.identity:
            raise OutputError(
                f"{folder}: this folder holds another pack: with {header.kind} experts, made from"
                f" {header.source.model}: give the same model and options, or another folder"
            )

    def _check_room(self, work: Path) -> None:
        present = _folder_bytes(work) if work.is_dir() else 0
        need = self.total + MARGIN - present
        free = shutil.disk_usage(work.parent).free
        if need > free:
            raise OutputError(
                f"{work.parent}: the pack needs {show_bytes(need)} of disk space, but only"
                f" {show_bytes(free)} are free: name a folder on a larger disk"
            )

    def _fill(self, folder: Path, done: PackProgress, source: PackSource) -> int:
        """Write the dense files and experts that a pack lacks, then its header.

        `done` records what is complete. Returns the number of experts that were packed.
        """
        files = tuple(self._dense_files(folder, done))
        dense = source.dense or fingerprint(dense_parts(folder, files))
        header = replace(self.header, source=replace(source, dense=dense), files=files)
        size = (folder / DATA).stat().st_size if (folder / DATA).exists() else 0
        done.experts = {
            expert: crc32
            for expert, crc32 in done.experts.items()
            if self._is_written(expert, crc32, size)
        }
        todo = [e for e in range(header.experts) if e not in done.experts]
        self.done += sum(header.layer_of(e)[0].stride for e in done.experts)
        self._experts(todo, folder, header, done)
        header.with_checksums(done.experts).save(folder)
        return len(todo)

    def _is_written(self, expert_id: int, crc32: tuple[int, ...], size: int) -> bool:
        """True if an expert that a journal lists as complete can be in the pack's data file.

        `size` is the data file's size in bytes, `crc32` the checksums in the journal.
        """
        if expert_id >= self.header.experts:
            return False
        layer, expert = self.header.layer_of(expert_id)
        return layer.place(expert + 1) <= size and len(crc32) == len(layer.runs)

    def _dense_files(self, folder: Path, done: PackProgress) -> Iterator[DenseFile]:
        for name, tensors in self.shards.items():
            file, path = done.files.get(name), folder / name
            if file is None or not path.is_file() or path.stat().st_size != file.nbytes:
                file = dense.write(path, dense.file_chunks(self.checkpoint, tensors), self._advance)
                done.add_file(file)
            else:
                self._advance(file.nbytes)
            yield file

    def repair(self, folder: Path) -> int:
        """Write a pack's damaged files and experts anew; return the number of these experts.

        Raises UsageError if the folder holds no pack, OutputError if it holds another pack.
        """
        if not is_pack(folder):
            raise UsageError(
                f"{folder}: this folder holds no pack, so --repair has nothing to repair"
            )
        header = read(folder)
        self._check_same(header, folder)
        damaged = set(Pack(folder, header).find_damaged())
        each = enumerate((layer, e) for layer in header.layers for e in range(layer.experts))
        crc32 = {n: layer.checksums(e) for n, (layer, e) in each if n not in damaged}
        done = PackProgress(crc32, (file for file in header.files if file not in damaged))
        return self._fill(folder, done, header.source)

    def _experts(
        self, todo: list[int], folder: Path, header: PackHeader, progress: PackProgress
    ) -> None:
        """Pack the experts `todo`, and record them in `progress` once they are on disk."""
        done: dict[int, tuple[int, ...]] = {}
        unsynced, at = 0, time.monotonic()

        def flush() -> None:
            data.sync()
            progress.add_experts(done)
            done.clear()

        with (
            ExpertsFile(folder / DATA, header) as data,
            closing(write_experts(self.catalog, header.layers, self.packers, data, todo)) as packed,
        ):
            try:
                for expert, crc in packed:
                    done[expert] = crc
                    stride = header.layer_of(expert)[0].stride
                    unsynced += stride
                    self._advance(stride)
                    if unsynced >= SYNC_BYTES or time.monotonic() - at >= SYNC_S:
                        flush()
                        unsynced, at = 0, time.monotonic()
            finally:  # an interrupt must not lose finished experts
                flush()


def _check_free(folder: Path, what: str) -> None:
    """Raise OutputError if a pack's output path is a file, or a folder that is not empty.

    `what` ends the message.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise OutputError(f"{folder}: this folder is not empty: {what}")
    elif folder.exists() or folder.is_symlink():
        raise OutputError(f"{folder}: this is not a folder: name a folder with -o")


def _folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
