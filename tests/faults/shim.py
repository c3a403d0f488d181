"""Operations that fail: the Python side of shim.cpp.

A process that was started by `start` has the layer. Then

    with armed(KINDS["EIO"], 3, folder) as fault:
        ...                                   # the third operation that can fail so fails
    fault.operation, fault.counts             # what failed, or None; operations by name
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")
BUILD = Path(__file__).parents[2] / "build" / "faults"
COMPILE = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-nonnull", "-o")
SLOW_S = float(os.environ.get("GREENROOM_FAULTS_SLOW_S", "0.05"))
# The order is that of shim.cpp.
OPERATIONS = (
    "open", "create", "read", "write", "sync", "rename", "remove", "truncate", "folder", "link",
    "lock", "map", "allocate", "thread",
)  # fmt: skip
EFFECTS = ("fail", "short", "wrong", "slow")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what happens to which operations.

    effect:     one of EFFECTS
    goes_on:    all operations after the first one fail too, as on a full disk
    is_harmless: the system may do this at any time, so that the result must be right
    """

    name: str
    operations: tuple[str, ...]
    effect: str = "fail"
    code: int = 0
    goes_on: bool = False
    is_harmless: bool = False


FILES = OPERATIONS[:11]
WRITES = ("create", "write", "truncate", "folder", "link", "rename")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("EIO", FILES, code=errno.EIO),
        Kind("ENOSPC", WRITES, code=errno.ENOSPC, goes_on=True),
        Kind("EMFILE", ("open", "create"), code=errno.EMFILE),
        Kind("EINTR", ("open", "create", "read", "write", "sync", "lock"), code=errno.EINTR,
             is_harmless=True),
        Kind("short", ("read", "write"), "short", is_harmless=True),
        Kind("slow", ("read", "write", "sync"), "slow", is_harmless=True),
        Kind("wrong", ("read",), "wrong"),
        Kind("memory", ("map", "allocate"), code=errno.ENOMEM),
        Kind("thread", ("thread",), code=errno.EAGAIN),
    )
}  # fmt: skip


@dataclass
class Fault:
    """What happened while the layer was armed."""

    operation: str | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, kind: Kind) -> int:
        """The operations that could have failed."""
        return sum(self.counts[name] for name in kind.operations)


def build() -> Path:
    """Compile the layer, if its source has changed; the library's path."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = BUILD / f"shim-{digest}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "c++").split()
        subprocess.run([*compiler, *COMPILE, draft, SOURCE, "-ldl", "-pthread"], check=True)
        draft.rename(library)
    return library


def start(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a process that has the layer; its output goes on to ours."""
    environment = {**os.environ, "LD_PRELOAD": str(build())}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, text=True, check=False
    )


@cache
def _layer() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.faults_arm.argtypes = [
        ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
        ctypes.c_double, ctypes.c_bool,
    ]  # fmt: skip
    return library


@contextmanager
def armed(kind: Kind, number: int, folder: Path) -> Iterator[Fault]:
    """Let the `number`-th operation below a folder fail; 0 only counts."""
    fault, counts = Fault(), (ctypes.c_uint64 * len(OPERATIONS))()
    chosen = sum(1 << OPERATIONS.index(name) for name in kind.operations) if number else 0
    _layer().faults_arm(
        str(folder).encode(), chosen, number, EFFECTS.index(kind.effect), kind.code, SLOW_S,
        kind.goes_on,
    )  # fmt: skip
    try:
        yield fault
    finally:
        fired = _layer().faults_disarm(counts)
        fault.counts = dict(zip(OPERATIONS, counts, strict=True))
        fault.operation = OPERATIONS[fired] if fired >= 0 else None


@contextmanager
def logged(folder: Path, log: Path) -> Iterator[None]:
    """Record every change of files below a folder in a file: see power_cuts.py."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _layer().faults_log(file)
    try:
        with armed(KINDS["EIO"], 0, folder):
            yield
    finally:
        _layer().faults_log(-1)
        os.close(file)


def numbers(count: int, most: int) -> Sequence[int]:
    """At most so many of the operations 1 to `count`: the first and last ones, and some between."""
    if count <= most:
        return range(1, count + 1)
    edge = most // 4
    middle = most - 2 * edge
    between = {edge + 1 + (count - 2 * edge) * k // middle for k in range(middle)}
    return sorted({*range(1, edge + 1), *between, *range(count - edge + 1, count + 1)})
