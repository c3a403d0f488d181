"""Numba's compiled code on disk, shared by several processes.

Numba keeps an index and numbered files for each function, and takes no lock. Two processes that
save at once may choose the same number, and one that loads may find a number whose file is still
that of older sources: machine code of another function, or another version of it. So saving and
loading take turns here, by a lock on a file beside the index. `njit` and `cfunc` are Numba's own:
what is kept on disk takes them from here.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from numba import cfunc, njit
from numba.core import caching

__all__ = ["cfunc", "njit", "take_turns"]

LOCKED = "greenroom_locked"


@contextmanager
def turn(index: str, exclusive: bool) -> Iterator[None]:
    """Hold the lock of an index; where no file can be locked, nothing can be kept there either."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(Path(f"{index}.lock").open("a" if exclusive else "r"))
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def take_turns() -> None:
    """Have all of Numba's caches of this process take turns with other processes'."""
    kind: Any = caching.IndexDataCacheFile
    for name, exclusive in (("save", True), ("load", False)):
        method = getattr(kind, name)
        if not hasattr(method, LOCKED):
            setattr(kind, name, _in_turn(method, exclusive))


def _in_turn(method: Callable[..., Any], exclusive: bool) -> Callable[..., Any]:
    @wraps(method)
    def called(self: Any, *args: Any) -> Any:
        with turn(self._index_path, exclusive):
            return method(self, *args)

    setattr(called, LOCKED, True)
    return called


take_turns()
