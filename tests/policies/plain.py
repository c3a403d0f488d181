"""Policies without Numba: a cache and a replay made of their plain Python functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from greenroom.core.cache import bound as caches
from greenroom.policies.helpers import bitsets
from greenroom.sim import replay as replays

# What one instruction of a processor does, which Numba has no Python function for.
INSTRUCTIONS: dict[Any, Callable[[Any], int]] = {
    bitsets._leading_zeros: lambda word: 64 - int(word).bit_length(),
    bitsets.trailing_zeros: lambda word: (int(word) & -int(word)).bit_length() - 1,
    bitsets.count_ones: lambda word: int(word).bit_count(),
}
PLAIN_FUNCTIONS: dict[Dispatcher, FunctionType] = {}


def plain(part: Any, modules: bool = False) -> Any:
    """The Python function of a compiled one, which calls Python functions itself."""
    for instruction, function in INSTRUCTIONS.items():
        if part is instruction:
            return function
    if modules and isinstance(part, ModuleType) and part.__name__.startswith("greenroom."):
        return SimpleNamespace(**{name: plain(value) for name, value in vars(part).items()})
    if not isinstance(part, Dispatcher):
        return part
    if part not in PLAIN_FUNCTIONS:
        function = part.py_func
        scope = dict(function.__globals__)
        PLAIN_FUNCTIONS[part] = FunctionType(function.__code__, scope, function.__name__)
        for name in scope.keys() & {*function.__code__.co_names}:
            scope[name] = plain(scope[name], modules=True)
    return PLAIN_FUNCTIONS[part]


def uncompiled(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make(*parts)`, of plain parts, where nothing is compiled."""
    original = make.__wrapped__  # type: ignore[attr-defined] # it is kept by functools.cache

    @cache
    def make_plain(*parts: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((caches, "jit"), (caches, "compiled"), (replays, "jit")):
                patch.setattr(module, name, lambda function, **options: function)
            return original(*map(plain, parts))

    return make_plain


BIND, LOOP = uncompiled(caches._bind), uncompiled(replays._loop)


@contextmanager
def plain_policies() -> Iterator[None]:
    """Caches that are made and streams that are replayed inside run plain Python functions."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):  # words wrap around
        patch.setattr(caches, "_bind", BIND)
        patch.setattr(replays, "_loop", LOOP)
        yield
