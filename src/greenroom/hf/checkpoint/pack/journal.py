"""The journal of an unfinished pack: a text file from which an interrupted job continues.

The first line is the plan of the pack, as JSON. Each further line says that an expert or a dense
file (non-expert tensors) is complete on disk: `expert ID CRC32...` (one checksum for each run of
bytes) or `dense NAME BYTES CRC32`. A line is written after the data have been synced. If the last
line is not terminated, the process ended while writing it, and it is ignored.
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
RESUME_HINT = "; the work done so far is not lost: run the same command again to continue"
NUMBER = r"\d{1,19}"  # a size or a checksum
LINE = re.compile(
    rf"^(?:expert ({NUMBER})((?: {NUMBER})+)|dense (\S+) ({NUMBER}) ({NUMBER}))$", re.ASCII
)


@contextmanager
def write_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Context manager that turns an OSError into an OutputError that names the file.

    `hint` is added at the end of the message.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}{hint}") from error


class PackProgress:
    """The experts and dense files of a pack that are complete on disk.

    experts: the checksums of complete experts, by expert id
    files:   the complete files of non-expert tensors, by name
    """

    def __init__(self, experts: dict[int, tuple[int, ...]], files: Iterable[DenseFile]) -> None:
        self.experts, self.files = experts, {file.name: file for file in files}

    def add_experts(self, done: dict[int, tuple[int, ...]]) -> None:
        """Record that some of a pack's experts are complete on disk, with their checksums."""
        self.experts |= done
        self._write(*(f"expert {n} {' '.join(map(str, crcs))}" for n, crcs in done.items()))

    def add_file(self, file: DenseFile) -> None:
        """Record that one of a pack's files of non-expert tensors is complete on disk."""
        self.files[file.name] = file
        self._write(f"dense {file.name} {file.nbytes} {file.crc32}")

    def _write(self, *lines: str) -> None:
        """Do nothing: only a journal writes a pack's progress to a file."""


class Journal(PackProgress):
    """The progress of an unfinished pack, stored in a locked file that outlives the process.

    The file is created in the pack's folder, or read if it exists. `plan` identifies the pack and
    `command` is the command that makes it. Raises OutputError if another process is making the
    pack, or if the file is that of a pack with another plan.
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
            raise OutputError(
                f"{self.path}: another process is making this pack: wait until it ends"
            ) from error
        self._file.seek(0)
        complete, _, unterminated = self._file.read().rpartition(b"\n")
        lines = complete.decode(errors="replace").split("\n") if complete else []
        if not lines:
            self._file.truncate(0)
            self._write(json.dumps(plan))
            return
        if unterminated:
            self._file.truncate(len(complete) + 1)
        earlier = _plan(lines[0].encode())
        if {**earlier, "command": ""} != {**json.loads(json.dumps(plan)), "command": ""}:
            command = _command(earlier)
            raise OutputError(
                f"{self.path.parent}: this folder holds another unfinished pack: "
                + (f"run `{command}` to finish that pack, or " if command else "")
                + "delete the folder"
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
        """Close the journal of an unfinished pack; its file stays on disk."""
        self._file.close()

    def remove(self) -> None:
        """Delete the journal of a pack that is finished."""
        os.unlink(self.path)


def resume_command(folder: Path) -> str | None:
    """Return the command that finishes the unfinished pack in a folder.

    None if the folder holds no unfinished pack; "greenroom pack" if its journal is damaged.
    """
    path, command = folder / NAME, ""
    if not path.is_file():
        return None
    with suppress(OSError), open(path, "rb") as file:
        command = _command(_plan(file.readline(LONGEST + 1)))
    return command or "greenroom pack"


def _plan(line: bytes) -> dict[str, Any]:
    try:
        return JsonObject(parse(line)).values
    except Malformed:
        return {}


def _command(plan: dict[str, Any]) -> str:
    command = plan.get("command")
    if isinstance(command, str) and command.isprintable() and len(command) <= LONGEST_COMMAND:
        return command
    return ""
