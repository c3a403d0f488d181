"""Inputs that are kept: in the corpus, in the pool, and in memory that outlives a crash."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "data" / "corpus"  # inputs that were read wrongly once
POOL = Path(__file__).parents[2] / "build" / "fuzz"  # inputs that reached new code
HUNG_S = 60.0  # for one input, after which the process is killed
LARGEST = 16 << 20  # bytes of an input that outlive the process
HEAD = 256


def write(folder: Path, data: bytes) -> Path:
    """Write an input to a folder, under a digest."""
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class Shared:
    """The input that is being read, in memory that outlives a process that crashes."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, HEAD + LARGEST)
        self._number = 0

    def put(self, name: str, data: bytes) -> None:
        self._number += 1
        data = data[:LARGEST]
        head = f"{self._number} {name} {len(data)} ".encode().ljust(HEAD, b"\0")
        self._map[: HEAD + len(data)] = head + data

    def get(self) -> tuple[int, str, bytes]:
        """The number of inputs, and the format and the bytes of the last one."""
        number, name, size, *_ = self._map[:HEAD].split(b" ")
        return int(number), name.decode(), self._map[HEAD : HEAD + int(size)]

    @property
    def empty(self) -> bool:
        return self._map[0] == 0


def supervise(work: Callable[[Shared], int]) -> int:
    """Work in a process of its own: an input that ends it, or hangs, is kept like any other."""
    shared = Shared()
    child = os.fork()
    if not child:
        return work(shared)
    last, since = 0, time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        time.sleep(0.1)
        if shared.empty or shared.get()[0] != last:
            last, since = 0 if shared.empty else shared.get()[0], time.monotonic()
        elif time.monotonic() > since + HUNG_S:
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(ended[1])
    if code < 0 and not shared.empty:
        number, name, data = shared.get()
        print(
            f"\n{write(CORPUS / name, data)} ({name}, input {number}): {signal.Signals(-code).name}"
        )
    return abs(code)
