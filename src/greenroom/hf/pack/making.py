"""Make a pack: expert by expert, in bounded memory, resumable, never half-valid.

A pack grows in a folder beside its final name and is renamed when all of it is on disk. Threads
read experts, encode them and write them to their places, which are known beforehand; when some have
been synced, the journal says so. A process that was killed loses what was not yet in the journal.
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

import numpy as np

from greenroom.config import show_bytes
from greenroom.core.layout import SlotLayout
from greenroom.errors import OutputError, UnknownName, UsageError
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.gguf import Gguf
from greenroom.hf.checkpoint.pack.crc import checksums
from greenroom.hf.checkpoint.pack.format import (
    DATA,
    KINDS,
    File,
    Header,
    Layer,
    Source,
    check_free,
    lay_out,
)
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.checkpoint.pack.journal import NAME as JOURNAL
from greenroom.hf.checkpoint.pack.journal import Journal
from greenroom.hf.checkpoint.pack.low import PRECISIONS, Low
from greenroom.hf.checkpoint.pack.reading import BESIDE, crc32_of, dense_parts, is_pack
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.draft import Draft
from greenroom.hf.pack import dense
from greenroom.hf.pack.benches import Benches
from greenroom.hf.pack.copy_makers import low_of, with_copy
from greenroom.hf.pack.data import Data
from greenroom.hf.pack.dense_gguf import NAME as GGUF_NAME
from greenroom.hf.pack.dense_gguf import copy_gguf
from greenroom.hf.pack.target import Maker, target_layout
from greenroom.runtime.memory.system import peak_rss_bytes
from greenroom.runtime.slots.cutting import Cutting

SYNC_BYTES, SYNC_S = 256 << 20, 1.0  # what a kill may lose
MARGIN = 16 << 20  # bytes; for the header, the journal and what file systems need

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """What was made. Bytes are of the pack, and of the experts as they were stored; `kept` experts
    had been made by an earlier run, or were not damaged. `peak_rss_bytes` is the process's;
    `copy_bytes` are what low-precision copies add, 0 where they are a part of their experts."""

    folder: Path
    nbytes: int
    expert_bytes: int
    source_expert_bytes: int
    experts: int
    kept: int
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
    repair: bool = False,
    progress: Progress = lambda done, total: None,
) -> Packed:
    """Make the pack `out` of a model, with its experts as `kind` (one of KINDS).

    `segments` cuts every expert along its intermediate dimension, so that a run may split it.
    `precision` (int8, int4) puts a copy of each expert before it, which a run may use for misses.
    What an earlier call left unfinished is gone on with. `repair` makes anew what is damaged in a
    pack that is there. `progress(done, total)` is told of bytes. Raises a GreenroomError; after
    OutputError and KeyboardInterrupt the same call goes on.
    """
    if kind not in KINDS:
        raise UnknownName("kind of experts", kind, KINDS)
    if segments < 1:
        raise UsageError(f"--segments must be at least 1, got {segments}")
    if precision is not None and precision not in PRECISIONS:
        raise UnknownName("miss precision", precision, PRECISIONS)
    if precision is not None and segments > 1:
        raise UsageError("--segments cuts experts that have no copies: leave out --miss-precision")
    began, folder = time.perf_counter(), Path(os.path.abspath(Path(out).expanduser()))
    checkpoint = find_checkpoint(source)
    inside = checkpoint.folder.parent if isinstance(checkpoint, Gguf) else checkpoint.folder
    if not repair and folder.resolve() == inside.resolve():
        raise UsageError(f"{folder}: is the model's own folder: name another one for the pack")
    job = _Job(Draft.of(checkpoint), _named(source), kind, segments, progress, precision)
    made = job.repair(folder) if repair else job.make(folder)
    kept = job.experts - made
    size = sum(path.stat().st_size for path in folder.iterdir())
    seconds = time.perf_counter() - began
    target = sum(layer.experts * layer.layout.nbytes for layer in job.layers)
    added = sum(x.experts * x.low.stride for x in job.layers if x.low and not x.low.nested)
    return Packed(
        folder, size, target, job.catalog.expert_bytes, job.experts, kept, seconds,
        peak_rss_bytes(), added,
    )  # fmt: skip


def _named(source: str) -> str:
    """How the source is called wherever one stands: a path, or a hub id."""
    path = Path(source).expanduser()
    return os.path.abspath(path) if source != "demo" and path.exists() else source


class _Job:
    """One source, packed to one kind."""

    def __init__(
        self,
        draft: Draft,
        model: str,
        kind: str,
        segments: int,
        progress: Progress,
        precision: str | None,
    ) -> None:
        self.draft, self.model, self.kind, self.progress = draft, model, kind, progress
        self.segments, self.precision = segments, precision
        self.checkpoint, self.catalog = draft.checkpoint, draft.catalog
        self.experts = self.catalog.experts
        exact = [self._maker(layer) for layer in range(len(self.catalog.layers))]
        lows = [self._low(layer, maker.target) for layer, maker in enumerate(exact)]
        self.makers = [
            m if low is None else with_copy(m, low) for m, low in zip(exact, lows, strict=True)
        ]
        counts = np.diff(self.catalog.offsets).tolist()
        targets = [maker.target for maker in exact]
        self.layers = lay_out([*zip(self.catalog.layers, counts, targets, lows, strict=True)])
        self.names = dense.dense_names(self.checkpoint, draft.dense_tensors)
        self.done = 0  # bytes

    def _low(self, layer: int, exact: SlotLayout) -> Low | None:
        """The copies of a layer, where there shall be any."""
        if self.precision is None:
            return None
        name, source = self.catalog.layers[layer], self.catalog.layouts[layer]
        module = self.draft.model.get_submodule(name)
        return low_of(self.precision, self.kind, source, exact, module, name)

    def _maker(self, layer: int) -> Maker:
        name, source = self.catalog.layers[layer], self.catalog.layouts[layer]
        module = self.draft.model.get_submodule(name)
        target = target_layout(self.kind, source, module, name)
        transposed = bool(module.is_transposed)
        pack = self.checkpoint.pack
        if source.segments or (pack is not None and pack.header.precision):
            what = "in segments" if source.segments else "with copies"
            raise UsageError(f"{self.model}: is a pack {what}: make another one of its source")
        if self.segments == 1:
            return Maker(self.kind, source, target, transposed, name)
        cutting = Cutting.of(module, target)
        cut = cutting.segments(self.segments, name)
        return Maker(self.kind, source, cut, transposed, name, cutting)

    @property
    def total(self) -> int:
        """Bytes of the pack, but for what is small."""
        last: Layer = self.layers[-1]
        return self.dense_bytes + last.place(last.experts)

    @property
    def dense_bytes(self) -> int:
        return sum(self.checkpoint.stored[name].nbytes for name in self.names)

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(min(self.done, self.total), self.total)

    def _header(self, dense_digest: str, files: tuple[File, ...]) -> Header:
        source = Source(self.model, fingerprint(self.checkpoint), dense_digest)
        return Header(self.kind, str(self.draft.dtype)[6:], source, self.layers, files)

    # ---- making

    def make(self, folder: Path) -> int:
        """Make the pack, or go on with it. Returns how many experts were made now."""
        more = "name another folder for the pack"
        check_free(folder, f"--repair mends a pack; {more}" if is_pack(folder) else more)
        if not folder.parent.is_dir():
            raise OutputError(f"{folder}: there is no folder {folder.parent}")
        work = folder.with_name(folder.name + BESIDE)
        self._check_room(work)
        self._begin(work)
        if is_pack(work) and not (work / JOURNAL).exists():
            self._check_same(read(work), work)  # all but its name was done
            made = 0
        else:
            journal = Journal(work, self._plan(), self._command(folder))
            with journal:
                made = self._fill(work, journal)
                journal.remove()
        try:
            os.rename(work, folder)
            _sync_folder(folder.parent)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error
        return made

    def _begin(self, work: Path) -> None:
        try:
            work.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"{work}: cannot be written: {error.strerror}") from error
        others = any(work.iterdir()) and not (work / JOURNAL).exists()
        if others and not is_pack(work):
            raise OutputError(f"{work}: is in the way: a pack grows there; delete or rename it")

    def _command(self, folder: Path) -> str:
        return self._header("", ()).command(folder)

    def _plan(self) -> dict[str, Any]:
        """What must be the same for a half-made pack to be gone on with."""
        files = sorted({*self.checkpoint.files, *self.catalog.files})
        stats = [(path, os.stat(path)) for path in files]
        return {
            "version": self._header("", ()).version,
            "identity": self._header("", ()).identity,
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        }

    def _check_same(self, header: Header, folder: Path) -> None:
        mine = self._header(header.source.dense, ())
        mine = replace(mine, source=replace(mine.source, model=header.source.model))
        if mine.identity != header.identity:
            raise OutputError(
                f"{folder}: is another pack: experts {header.kind}, made from {header.source.model}"
            )

    def _check_room(self, work: Path) -> None:
        there = sum(path.stat().st_size for path in work.iterdir()) if work.is_dir() else 0
        need = self.total + MARGIN - there
        free = shutil.disk_usage(work.parent).free
        if need > free:
            raise OutputError(
                f"{work.parent}: the pack needs {show_bytes(need)} there, {show_bytes(free)} are"
                " free"
            )

    def _fill(self, work: Path, journal: Journal) -> int:
        if not isinstance(self.checkpoint, Gguf):
            dense.copy_small(self.checkpoint.folder, work)
        files = tuple(self._dense_files(work, journal))
        header = self._header(fingerprint(dense_parts(work, files)), files)
        size = (work / DATA).stat().st_size if (work / DATA).exists() else 0
        journal.experts = {
            expert: crc32
            for expert, crc32 in journal.experts.items()
            if self._is_written(expert, crc32, size)
        }
        todo = [e for e in range(self.experts) if e not in journal.experts]
        self.done += sum(self._layer(e)[0].stride for e in journal.experts)
        with Data(work / DATA) as data:
            data.begin(header)
            self._experts(todo, data, journal.add_experts)
        header.with_checksums(journal.experts).save(work)
        return len(todo)

    def _is_written(self, expert: int, crc32: tuple[int, ...], size: int) -> bool:
        """Whether what a journal says of an expert can be so, in a data file of `size` bytes."""
        if expert >= self.experts or self._place(expert)[1] > size:
            return False
        return len(crc32) == len(self._layer(expert)[0].runs)

    def _dense_files(self, work: Path, journal: Journal) -> Iterator[File]:
        for name in self._shards():
            file = journal.files.get(name)
            path = work / name
            if file is None or not path.is_file() or path.stat().st_size != file.nbytes:
                file = self._copy(name, work)
                journal.add_file(file)
            else:
                self._advance(file.nbytes)
            yield file

    def _shards(self) -> dict[str, list[str]]:
        if isinstance(self.checkpoint, Gguf):
            return {GGUF_NAME: self.names}
        return dense.shards(self.checkpoint, self.names)

    def _copy(self, name: str, folder: Path) -> File:
        names, path = self._shards()[name], folder / name
        if isinstance(self.checkpoint, Gguf):
            return copy_gguf(self.checkpoint, names, path, self._advance)
        return dense.copy_safetensors(self.checkpoint, names, path, self._advance)

    # ---- repairing

    def repair(self, folder: Path) -> int:
        """Make anew what is damaged in a pack. Returns how many experts that were."""
        if not is_pack(folder):
            raise UsageError(f"{folder}: holds no pack to repair")
        header = read(folder)
        self._check_same(header, folder)
        files = tuple(
            file
            if (folder / file.name).is_file() and crc32_of(folder / file.name) == file.crc32
            else self._copy(file.name, folder)
            for file in header.files
        )
        each = ((x, e) for x in header.layers for e in range(x.experts))
        crc32 = {n: layer.checksums(e) for n, (layer, e) in enumerate(each)}
        wrong = [e for e in crc32 if self._crc32(folder, header, e) != crc32[e]]
        with Data(folder / DATA) as data:
            data.begin(header)
            self._experts(wrong, data, crc32.update)
        replace(header, files=files).with_checksums(crc32).save(folder)
        return len(wrong)

    def _crc32(self, folder: Path, header: Header, expert_id: int) -> tuple[int, ...]:
        layer, expert = header.layer_of(expert_id)
        with open(folder / DATA, "rb", buffering=0) as stream:
            stream.seek(layer.place(expert))
            return checksums(layer.runs, memoryview(stream.read(layer.nbytes)))

    # ---- experts

    def _layer(self, expert_id: int) -> tuple[Layer, int]:
        """(the layer, the expert's number in it)."""
        layer = self.catalog.layer_of(expert_id)
        return self.layers[layer], expert_id - self.catalog.offsets[layer]

    def _place(self, expert_id: int) -> tuple[int, int]:
        """(first byte, the one after the last)."""
        layer, expert = self._layer(expert_id)
        return layer.place(expert), layer.place(expert + 1)

    def _experts(
        self, todo: list[int], data: Data, note: Callable[[dict[int, tuple[int, ...]]], None]
    ) -> None:
        """Make these experts; `note` is told of checksums when the experts are on disk."""
        if not todo:
            return
        done: dict[int, tuple[int, ...]] = {}
        unsynced, at = 0, time.monotonic()

        def flush() -> None:
            data.sync()
            note(done)
            done.clear()

        with (
            Benches(self.catalog, self.layers, self.makers, data) as benches,
            closing(benches.make(todo)) as made,  # no thread writes any more when it is closed
        ):
            try:
                for expert, crc in made:
                    done[expert] = crc
                    stride = self._layer(expert)[0].stride
                    unsynced += stride
                    self._advance(stride)
                    if unsynced >= SYNC_BYTES or time.monotonic() - at >= SYNC_S:
                        flush()
                        unsynced, at = 0, time.monotonic()
            finally:  # what is done outlives an interruption
                flush()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
