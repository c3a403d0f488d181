"""A digest of everything that a function's compiled code depends on.

The digest covers the function's instructions and constants, and the values of its names, followed
through the functions, classes and tables of Greenroom and of code that is not installed (notebooks,
policies in files). Comments, docstrings, annotations and line numbers do not change the digest.
Objects of installed packages are represented by their names; the caller adds the packages'
versions.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.types import Type
from numba.extending import _Intrinsic

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
TABLES = (*PLAIN, tuple, list, dict, set, frozenset)
# Attributes of a class that depend on its file, or on its other attributes.
GENERATED = {"__module__", "__doc__", "__annotations__", "__dataclass_fields__", "__firstlineno__"}
COPIED = "__slotnames__"  # left on a class when an object of it is first copied or pickled


class FunctionDigest:
    """A hash of a function's code and of all values that the code refers to.

    An object that occurs a second time is represented by its number, so that cyclic references end.
    """

    def __init__(self, module: str) -> None:
        self._hash = hashlib.sha256()
        self._packages = {"greenroom", _package(module)}  # packages whose content is added
        self._numbers: dict[int, tuple[int, Any]] = {}  # id -> (number, the object, kept alive)

    @classmethod
    def of(cls, function: Callable[..., Any], *more: Any) -> str:
        """Return the digest of a function and other values, in hexadecimal digits."""
        digest = cls(function.__module__)
        digest._all((function, function.__module__, function.__qualname__, more))
        return digest._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add a value, and everything that the value refers to, to a function's digest.

        TypeError if the value's text contains an address, which differs from process to process.
        """
        kind = type(value)
        if kind in PLAIN:
            self._put(kind.__name__, repr(value))
        elif kind is tuple:
            self._put("tuple", len(value))
            self._all(value)
        elif kind is frozenset:
            self._put("frozenset", *sorted(map(repr, value)))
        elif id(value) in self._numbers:
            self._put("seen", self._numbers[id(value)][0])
        else:
            self._numbers[id(value)] = len(self._numbers), value
            self._follow(value)

    def _put(self, *texts: object) -> None:
        text = "\0".join(map(str, texts)).encode()
        self._hash.update(b"%d:%b" % (len(text), text))

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _follow(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._put("module", value.__name__)
        elif isinstance(value, Dispatcher):
            self.add((value.py_func, *sorted(value.targetoptions.items())))
        elif isinstance(value, _Intrinsic):
            self._put("intrinsic", value._prefer_literal)
            self.add(value._defn)
        elif isinstance(value, np.ndarray | np.generic):
            self._put("array", value.dtype, value.shape, value.tobytes().hex())
        elif hasattr(value, "__wrapped__"):  # functools.cache
            self.add(value.__wrapped__)
        else:
            self.add(type(value))
            self._instance(value)

    def _instance(self, value: Any) -> None:
        if isinstance(value, dict):
            self.add(tuple(value.items()))
        elif isinstance(value, list | tuple):
            self.add(tuple(value))
        elif isinstance(value, set):
            self.add(frozenset(value))
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self.add((value.__func__, value.__self__))
        elif isinstance(value, Enum):
            self._put(value.name)
        elif isinstance(value, Type):
            self._put(value)
            self.add(None if value.key is value else value.key)
        elif is_dataclass(value):
            self._all(getattr(value, field.name) for field in fields(value))
        elif self._is_own(type(value).__module__):
            self.add(vars(value))
        elif " at 0x" in (text := repr(value)):
            raise TypeError(
                f"there can be no digest of {text}: its text has an address, which"
                " differs in every process"
            )
        else:
            self._put(text)

    def _is_own(self, module: str) -> bool:
        return _package(module) in self._packages or not _is_installed(module)

    def _function(self, function: FunctionType) -> None:
        if not self._is_own(function.__module__):
            self._put("function", function.__module__, function.__qualname__)
            return
        code, names = _digest_of_code(function.__code__)
        self._hash.update(code)
        self.add((function.__defaults__, function.__kwdefaults__))
        self._all(cell.cell_contents for cell in function.__closure__ or ())
        scope = function.__globals__
        for name in [name for name in names if name in scope]:
            self._put("global", name)
            self.add(scope[name])
            if isinstance(scope[name], ModuleType) and self._is_own(scope[name].__name__):
                parts = vars(scope[name])
                self._all(parts[attribute] for attribute in names if attribute in parts)

    def _class(self, kind: type) -> None:
        self._put("class", kind.__module__, kind.__qualname__)
        if not self._is_own(kind.__module__):
            return
        self.add(kind.__bases__)
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType) and value.__code__.co_filename == "<string>":
                continue  # generated from the fields by dataclass or NamedTuple
            if name == COPIED:
                continue
            self._put(name)
            if isinstance(value, property):
                value = value.fget, value.fset
            elif isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, functools.cached_property):
                value = value.func
            elif not isinstance(value, (FunctionType, *TABLES)) or name in GENERATED:
                continue
            self.add(value)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_installed(module: str) -> bool:
    """Check whether a module belongs to Python or to an installed package.

    The content of other modules may change while their names stay: a notebook's cells, a script.
    """
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or _is_installed_file(file)


@cache
def _is_installed_file(file: str) -> bool:
    places = Path(file).parents
    library = Path(os.__file__).parent
    return library in places or any(p.name in ("site-packages", "dist-packages") for p in places)


@cache
def _digest_of_code(code: CodeType) -> tuple[bytes, tuple[str, ...]]:
    """Return a code object's digest, and the names in it, each once, in order."""
    steps, used = bytearray(code.co_code), dict[int, int]()
    extended = 0
    for i in range(0, len(steps), 2):  # number constants by use: a docstring has a number too
        operation, argument = steps[i], extended | steps[i + 1]
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in dis.hasconst:
            steps[i + 1] = used.setdefault(argument, len(used)) & 255
    layout = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    code_digest = hashlib.sha256(
        repr((bytes(steps), code.co_exceptiontable, layout, names)).encode()
    )
    names_used = dict.fromkeys(code.co_names)
    for constant in map(code.co_consts.__getitem__, used):
        if isinstance(constant, CodeType):
            digest, inner = _digest_of_code(constant)
            names_used |= dict.fromkeys(inner)
        else:
            unordered = isinstance(constant, frozenset)
            digest = repr(sorted(map(repr, constant)) if unordered else constant).encode()
        code_digest.update(b"%d:%b" % (len(digest), digest))
    return code_digest.digest(), tuple(names_used)
