"""What of a pack is done, while it is made: a file of lines that outlives the process.

The first line is what the pack is to be, as JSON. Each further one says that a piece is complete,
on disk: `expert ID CRC32` (of each segment, where there are several) or `dense NAME BYTES CRC32`.
Lines are added after what they say has been synced. A last line without its end was being written
when the process ended, and is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from greenroom.errors import OutputError
from greenroom.hf.checkpoint.pack.format import DenseFile
from greenroom.json_file import LONGEST, JsonObject, Malformed, parse

NAME = "unfinished"
LONGEST_COMMAND = 1000  # characters
RESUME_HINT = "; what is packed so far is kept: the same command goes on"
NUMBER = r"\d{1,19}"  # a size or a checksum
LINE = re.compile(
    rf"^(?:expert ({NUMBER})((?: {NUMBER})+)|dense (\S+) ({NUMBER}) ({NUMBER}))$", re.ASCII
)


@contextmanager
def write_errors(path: Path, kept: str = "") -> Iterator[None]:
    """OutputError where `path` cannot be written; `kept` says what is not lost."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}{kept}") from error


class PackProgress:
    """What of a pack is on disk: the checksums of experts, by their ids, and the dense files."""

    def __init__(self, experts: dict[int, tuple[int, ...]], files: Iterable[DenseFile]) -> None:
        self.experts, self.files = experts, {file.name: file for file in files}

    def add_experts(self, done: dict[int, tuple[int, ...]]) -> None:
        """These experts are on disk, with these checksums."""
        self.experts |= done
        self._write(*(f"expert {n} {' '.join(map(str, crcs))}" for n, crcs in done.items()))

    def add_file(self, file: DenseFile) -> None:
        """This file of the dense parts is on disk."""
        self.files[file.name] = file
        self._write(f"dense {file.name} {file.nbytes} {file.crc32}")

    def _write(self, *lines: str) -> None:
        """Nowhere: only a journal outlives the process."""


class Journal(PackProgress):
    """Opens the journal of `folder`, or begins it; locked until it is closed.

    OutputError where another pack is being made there, or was begun.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], command: str) -> None:
        super().__init__({}, ())
        self.path = folder / NAME
        with ExitStack() as stack, write_errors(self.path):
            self._file = stack.enter_context(open(self.path, "a+b", buffering=0))
            self._begin({"command": command, **plan})
            stack.pop_all()  # it stays open

    def _begin(self, plan: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{self.path}: another process is making this pack") from error
        self._file.seek(0)
        whole, _, torn = self._file.read().rpartition(b"\n")
        lines = whole.decode(errors="replace").split("\n") if whole else []
        if not lines:
            self._file.truncate(0)
            self._write(json.dumps(plan))
            return
        if torn:
            self._file.truncate(len(whole) + 1)
        found = _plan(lines[0].encode())
        if {**found, "command": ""} != {**json.loads(json.dumps(plan)), "command": ""}:
            said = _command(found)
            raise OutputError(
                f"{self.path.parent}: holds another half-made pack"
                + (f": finish it with `{said}`, or delete it" if said else ": delete it")
            )
        for line in lines[1:]:
            match LINE.split(line):
                case ["", str(number), crcs, *_, ""]:
                    self.experts[int(number)] = tuple(map(int, crcs.split()))
                case ["", _, _, name, nbytes, crc, ""]:
                    self.files[name] = DenseFile(name, int(nbytes), int(crc))

    def _write(self, *lines: str) -> None:
        data = memoryview("".join(f"{line}\n" for line in lines).encode())
        with write_errors(self.path):
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Leave the journal as it is."""
        self._file.close()

    def remove(self) -> None:
        """All is done."""
        os.unlink(self.path)


def resume_command(folder: Path) -> str | None:
    """The command that finishes the half-made pack in a folder; None where there is none."""
    path, found = folder / NAME, ""
    if not path.is_file():
        return None
    with suppress(OSError), open(path, "rb") as file:
        found = _command(_plan(file.readline(LONGEST + 1)))
    return found or "greenroom pack"


def _plan(line: bytes) -> dict[str, Any]:
    try:
        return JsonObject(parse(line)).values
    except Malformed:
        return {}


def _command(plan: dict[str, Any]) -> str:
    found = plan.get("command")
    if isinstance(found, str) and found.isprintable() and len(found) <= LONGEST_COMMAND:
        return found
    return ""
