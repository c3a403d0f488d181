"""Compiled functions that are made of parts given at run time, kept on disk all the same.

Numba keeps no function that closes over other functions. A copy of it that finds them among its
globals is kept; what tells one copy from another, and an old source from a new one, is a number
that it closes over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from greenroom.core.compiled_files import njit

PACKAGE = Path(__file__).parents[1]
FOLDERS = ("core", "policies", "sim")  # whose sources may be compiled into such a function

Make = Callable[[int], Callable[..., Any]]


@cache
def _source() -> bytes:
    """A digest of the sources."""
    paths = [path for name in FOLDERS for path in sorted((PACKAGE / name).glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).digest()


def bound(make: Make, parts: dict[str, Any], **options: Any) -> Any:
    """The function that `make(stamp)` returns, compiled with `parts` among its globals.

    A part is a compiled function or a constant; `options` are Numba's.
    """
    return njit(**options)(_with_parts(make, parts))


def kept(make: Make, parts: dict[str, Any]) -> Any:
    """`bound`, without the GIL, and kept on disk: later processes find it compiled.

    Where nothing can be written, each process compiles anew.
    """
    options = {"nogil": True, "_nrt": False}
    try:
        return bound(make, parts, cache=True, **options)
    except RuntimeError:  # no folder that can be written
        return bound(make, parts, **options)


def _with_parts(make: Make, parts: dict[str, Any]) -> FunctionType:
    name = ";".join(f"{key}={_name(part)}" for key, part in sorted(parts.items()))
    digest = hashlib.sha256(_source() + name.encode()).digest()
    template: Any = make(int.from_bytes(digest[:7], "little"))
    scope, closure = template.__globals__ | parts, template.__closure__
    function = FunctionType(template.__code__, scope, template.__name__, None, closure)
    function.__module__, function.__qualname__ = template.__module__, template.__qualname__
    function.__dict__["parts"] = name
    return function


def _name(part: Any) -> str:
    """What tells a part from others: where it is written, and the parts that it has itself."""
    function = getattr(part, "py_func", None)
    if function is None:
        return repr(part)
    line, parts = function.__code__.co_firstlineno, function.__dict__.get("parts", "")
    return f"{function.__module__}.{function.__qualname__}@{line}({parts})"
