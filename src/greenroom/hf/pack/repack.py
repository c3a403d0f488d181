"""A model's copy for faster reads (`--repack`): each expert is one contiguous, aligned run.

The copy is a pack whose experts are stored as in the model. It is made once, and used while the
model's files have the sizes and modification times that they had then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from greenroom.errors import UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.pack.header_file import read as read_header
from greenroom.hf.checkpoint.pack.reading import is_pack
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.pack.packing import pack
from greenroom.json_file import Malformed, read_json, text
from greenroom.trace.container import atomic_file

RECORD, FORMAT = "repacked.json", "greenroom-repacked"

Progress = Callable[[float, str], None]


def repacked(source: str, folder: str, config: str | None, progress: Progress) -> str:
    """Return the folder of a model's copy in which each expert is one read; make it if missing.

    source: the model's folder, GGUF file or hub id
    folder: the copy's folder; a copy that was interrupted is continued
    config: folder, file or hub id with the config of a GGUF file

    Raises UsageError if the folder holds something else, if the model has changed since the copy
    was made, or if the model is a pack. Raises OutputError if the copy cannot be written.
    """
    path = Path(os.path.abspath(Path(folder).expanduser()))
    checkpoint = find_checkpoint(source, config)
    if checkpoint.pack is not None:
        raise UsageError(f"--repack: {source} is a pack, which is read in this way already")
    if not is_pack(path):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UsageError(
                f"--repack {folder}: this is no copy of the model: name a folder that is empty or"
                " does not exist"
            )
        stamps = _stamps(checkpoint)
        what = f"copying the model to {folder}"
        pack(
            source, path, "same", config=config,
            progress=lambda done, of: progress(done / of, f"{what}, {done / of:.0%}"),
        )  # fmt: skip
        _record(path, stamps)
    _check(checkpoint, path, folder)
    return str(path)


def _check(checkpoint: Checkpoint, path: Path, folder: str) -> None:
    """Raise UsageError if a pack is not the copy of a model as it is now."""
    header, stamps = read_header(path), _stamps(checkpoint)
    if header.kind != "same" or header.source.fingerprint != fingerprint(checkpoint):
        raise UsageError(
            f"--repack {folder}: this folder holds a pack of another model or with other experts"
            f" ({header.kind} from {header.source.model}): name another folder"
        )
    if not (path / RECORD).exists():  # `greenroom pack` made or completed it
        copy_time = os.stat(path / "greenroom.json").st_mtime_ns
        changed = [each for each in stamps if int(each.split()[-1]) > copy_time]
        if not changed:
            _record(path, stamps)
    else:
        before = _recorded(path)
        changed = [each for each in stamps if each not in before]
    if changed:
        name = changed[0].rsplit(" ", 2)[0]
        raise UsageError(
            f"--repack {folder}: {name} has changed since this copy was made: delete the"
            " folder, and the copy is made again"
        )


def _stamps(checkpoint: Checkpoint) -> list[str]:
    """Return name, size and modification time (ns) of each of a checkpoint's weight files."""
    stats = ((path, os.stat(path)) for path in sorted(checkpoint.files))
    return [f"{Path(path).name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]


def _record(path: Path, stamps: list[str]) -> None:
    with atomic_file(path / RECORD) as file:
        file.write(json.dumps({"format": FORMAT, "files": stamps}, indent=1).encode())


def _recorded(path: Path) -> tuple[str, ...]:
    """Return the stamps of the model's files when the copy was made."""
    record = read_json(path / RECORD, FORMAT, "is no record of a copy", "--repack", UsageError)
    try:
        return record.list_of("files", text)
    except Malformed as error:
        raise UsageError(f"{path / RECORD}: {error}: delete this file") from error
