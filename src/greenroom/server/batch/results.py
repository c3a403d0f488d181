"""Results of a batch: a file with one line an answer, to which a later run adds the missing ones.

with Results(Path("answers.jsonl"), requests) as results:
    results.done                          # requests that an earlier run has answered
    results.add(request, 200, answer, "req_1")
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from greenroom.errors import GreenroomError, UsageError
from greenroom.server.batch.requests import BatchRequest
from greenroom.trace.container import atomic_file

SYNC_S = 1.0  # seconds of answers that a power cut may take
BEGIN = b'{"id": '  # of every line


class Results:
    """The file of a batch's results, which one process writes.

    A line is written at once when its answer ends, so a killed process has lost none. A last line
    that is not complete is removed when the file is opened. UsageError if the file belongs to other
    requests, or to another process.

    done: custom_ids of the requests that have their line
    """

    def __init__(self, path: Path, requests: Sequence[BatchRequest]) -> None:
        self.path, self.done = path, set[str]()
        self._synced = time.monotonic()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
        try:
            self._lock()
            self._size = self._read({each.custom_id: each for each in requests})
            os.ftruncate(self._file, self._size)
        except OSError as error:
            os.close(self._file)
            raise UsageError(f"{path}: cannot be used: {error.strerror or error}") from error
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process writes {self.path}") from error

    def _read(self, requests: dict[str, BatchRequest]) -> int:
        """Read the complete lines into `done`; return their bytes.

        After a power cut, lines that were written last may be zeros or joined. Where other lines
        are answers, these are left out, and the file is written anew.
        """
        good: list[tuple[int, int]] = []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.lstrip(b"\0")
                begins = text[: len(BEGIN)] == BEGIN[: len(text)]
                name, digest = _ids(text) if text.endswith(b"\n") else ("", "")
                if not name:  # incomplete, zeros, or joined
                    if text and not begins and (text.endswith(b"\n") or not good):
                        raise self._foreign(number)
                    continue
                request = requests.get(name)
                if request is None or request.digest != digest or name in self.done:
                    raise self._foreign(number)
                self.done.add(name)
                good.append((file.tell() - len(text), len(text)))
        size = sum(length for _, length in good)
        if good and size != sum(good[-1]):
            self._keep(good)
        return size

    def _foreign(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path}, line {number}: not an answer to a request of this file:"
            " give another --out"
        )

    def _keep(self, lines: Sequence[tuple[int, int]]) -> None:
        """Write the file anew with some of its lines, each a (begin, length)."""
        with self.path.open("rb") as old, atomic_file(self.path) as new:
            for begin, length in lines:
                old.seek(begin)
                new.write(old.read(length))
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._lock()

    def add(self, request: BatchRequest, status: int, answer: Any, request_id: str) -> None:
        """Write the line of an answer; GreenroomError, and no part of it, if that fails."""
        line = {
            "id": request.digest,
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": answer},
            "error": None,
        }
        data = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if time.monotonic() >= self._synced + SYNC_S:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise GreenroomError(
                f"{self.path}: cannot be written: {error.strerror or error}"
            ) from error
        self._size = os.lseek(self._file, 0, os.SEEK_END)
        self.done.add(request.custom_id)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


def _ids(line: bytes) -> tuple[str, str]:
    """Return `custom_id` and `id` of a line of results; empty texts if the line has none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(content, dict):
        return "", ""
    return str(content.get("custom_id", "")), str(content.get("id", ""))
