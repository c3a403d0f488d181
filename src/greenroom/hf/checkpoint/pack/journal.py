"""The journal of an unfinished pack: a file of lines that outlives the process.

The first line is the plan of the pack, as JSON. Each further line says that a part is complete on
disk: `expert ID CRC32...` (one checksum a run) or `dense NAME BYTES CRC32`. A line is written after
its part has been synced. An unterminated last line was being written when the process ended, and is
ignored.
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
RESUME_HINT = "; the parts packed so far are not lost: run the same command again to continue"
NUMBER = r"\d{1,19}"  # a size or a checksum
LINE = re.compile(
    rf"^(?:expert ({NUMBER})((?: {NUMBER})+)|dense (\S+) ({NUMBER}) ({NUMBER}))$", re.ASCII
)


@contextmanager
def write_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Context manager that turns an OSError of writing a file into OutputError.

    `hint` ends the message.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}{hint}") from error


class PackProgress:
    """The finished parts of a pack: experts (ids and checksums) and dense files."""

    def __init__(self, experts: dict[int, tuple[int, ...]], files: Iterable[DenseFile]) -> None:
        self.experts, self.files = experts, {file.name: file for file in files}

    def add_experts(self, done: dict[int, tuple[int, ...]]) -> None:
        """Record in a pack's progress that experts are on disk, with their checksums."""
        self.experts |= done
        self._write(*(f"expert {n} {' '.join(map(str, crcs))}" for n, crcs in done.items()))

    def add_file(self, file: DenseFile) -> None:
        """Record in a pack's progress that a file of dense parts is on disk."""
        self.files[file.name] = file
        self._write(f"dense {file.name} {file.nbytes} {file.crc32}")

    def _write(self, *lines: str) -> None:
        """Do nothing: only a journal writes a pack's progress to a file."""


class Journal(PackProgress):
    """The progress of an unfinished pack, in a locked file that outlives the process.

    The file is in `folder` and is created if needed.

    Raises OutputError where another process makes this pack, or the folder holds another pack.
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
                f"{self.path.parent}: holds another unfinished pack"
                + (f": finish it with `{command}`, or delete it" if command else ": delete it")
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
    """Return the command that finishes the unfinished pack in a folder; None without one."""
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
