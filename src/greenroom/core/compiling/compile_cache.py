"""The compile cache: Numba's compiled code on disk, under a digest of its sources.

There is one file for each function and signature. The file's name has a digest of all that the code
depends on, so a file is never out of date and no locks are needed. A new file is written under a
temporary name and then renamed. A damaged file does not match its checksum, and its function is
compiled again. All processes, installations and checkouts of one user share the folder. If the
folder cannot be written, each process compiles what it needs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import bytecode, config, serialize, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult

from greenroom.core.compiling.compile_folder import folder
from greenroom.core.compiling.function_digest import FunctionDigest

FORMAT = 1
LIMIT = 256 << 20  # bytes of the folder; all of Greenroom's kernels and policies take 20 MiB
SUFFIX = ".nbc"


class CompileCache:
    """The on-disk compile cache of one function, with the interface that Numba calls."""

    def __init__(self, function: FunctionType, options: dict[str, Any]) -> None:
        self._function, self._options = function, sorted(options.items())

    def path(self, signature: Any, codegen: Any) -> Path:
        """Return the file of a function's compiled code for an argument signature."""
        key = (sigutils.normalize_signature(signature), codegen.magic_tuple(), versions())
        digest = FunctionDigest.of(self._function, self._options, key)
        name = f"{self._function.__module__.rpartition('.')[2]}.{self._function.__name__}"
        return folder() / f"{name}-{digest[:40]}{SUFFIX}"

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """Load a function's compiled code for an argument signature from disk.

        None if the code is not on disk, or its file is damaged.
        """
        target_context.refresh()
        data = read(self.path(sig, target_context.codegen()))
        return None if data is None else CompileResult._rebuild(target_context, *pickle.loads(data))

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        """Save a function's compiled code, unless it contains addresses of this process."""
        if not data.library.has_dynamic_globals:
            write(self.path(sig, data.codegen), serialize.dumps(data._reduce()))


def jit(function: Any = None, /, **options: Any) -> Any:
    """Decorator: Numba's `njit` without the GIL, with compiled code cached on disk."""
    if function is None:
        return partial(jit, **options)
    compiled = numba.njit(nogil=True, **options)(function)
    compiled._cache = CompileCache(function, options)
    return compiled


def entry_point(function: Any, signature: Any) -> Any:
    """Compile a function for callers outside of Python, or load it from the compile cache."""
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options={})
    compiled._cache = CompileCache(function, {"called from": "C"})
    compiled.compile()
    return compiled


def with_parts(template: Any, parts: dict[str, Any]) -> FunctionType:
    """Copy a function, with some of its module's globals replaced in the copy.

    parts: the replacements (compiled functions and constants), by the names of the globals
    """
    scope = template.__globals__ | parts
    copied = FunctionType(template.__code__, scope, template.__name__, template.__defaults__)
    copied.__module__, copied.__qualname__ = template.__module__, template.__qualname__
    return copied


@cache
def versions() -> tuple[Any, ...]:
    """Return the package versions and compiler settings that compiled code depends on."""
    packages = numba.__version__, llvmlite.__version__, np.__version__
    levels = config.OPT, config.LOOP_VECTORIZE, config.SLP_VECTORIZE, config.BOUNDSCHECK
    return FORMAT, sys.version, packages, tuple(map(str, levels))


def read(path: Path) -> bytes | None:
    """Read a file of the compile cache; None if it is missing, damaged or not trusted.

    The content is machine code, in a pickle. Only files of this user or of root are trusted, and
    only if no other user may write them: the folder of NUMBA_CACHE_DIR may be a shared one.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                return None
            data = file.read()
        os.utime(path)  # `trim` removes the files used longest ago
    except OSError:
        return None
    checksum, data = data[:32], data[32:]
    return data if hashlib.sha256(data).digest() == checksum else None


def write(path: Path, data: bytes) -> None:
    """Write a file of the compile cache atomically, then trim the folder.

    If the file cannot be written, the function returns without an error.
    """
    with suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(data).digest() + data)
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
        trim(path.parent, LIMIT)


def trim(where: Path, limit: int) -> None:
    """Remove a folder's least recently used files until the rest are below a given size.

    limit: the largest size of the remaining files together, in bytes
    """
    with os.scandir(where) as entries:
        files = [(s.st_mtime, s.st_size, e.path) for e in entries if (s := _status(e)) is not None]
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            return
        with suppress(OSError):  # another process may remove it first
            os.unlink(path)
        total -= size


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    with suppress(OSError):
        return entry.stat()
    return None


class _UniqueIds:
    """Random numbers that make the symbols of Numba's functions unique.

    Numba counts in each process, so that two processes give one symbol to different code: a third
    process that loads both would call the first in place of the second.
    """

    def __next__(self) -> int:
        return int.from_bytes(os.urandom(8), "little")


bytecode.FunctionIdentity._unique_ids = _UniqueIds()
