"""Coverage of Greenroom's readers: which statements an input reaches, and constants in their code.

`install` changes how the modules of `READERS` are imported: before each statement of a function
stands `__hits__[number] = 1`, which takes 20 ns. It must come before the first import of Greenroom.
(`sys.monitoring` needs Python 3.12; Greenroom runs from 3.11 on. atheris has one loop a process, so
each format would import torch again, and take more than its share of a minute for that.)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import numpy as np

from tests.fuzz.readers import READERS

PREFIX = "greenroom."
MOST = 1 << 15  # statements of all readers
HITS = bytearray(MOST)  # one byte a statement: 1 once it was reached
SPANS: dict[str, range] = {}  # the statements of each module
CONSTANTS: dict[str, set[int | bytes]] = {}  # numbers and short texts in each module's code
_VIEW = np.frombuffer(HITS, np.bool_)


def install() -> None:
    """Change the import of the readers' modules, unless that was done before."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        early = {PREFIX + name for names in READERS.values() for name in names} & set(sys.modules)
        assert not early, f"imported too early: {sorted(early)}"
        sys.meta_path.insert(0, _Finder())


def reached(name: str | None = None) -> int:
    """Count the reached statements: of all readers, or of one format's."""
    if name is None:
        return int(np.count_nonzero(_VIEW))
    return sum(int(np.count_nonzero(_VIEW[span.start : span.stop])) for span in _spans(name))


def statements(name: str) -> int:
    """Count the statements of a format's readers."""
    return sum(map(len, _spans(name)))


def constants(name: str) -> list[int | bytes]:
    """Return numbers and short texts in the code of a format's readers."""
    found = {each for module in READERS[name] for each in CONSTANTS.get(PREFIX + module, ())}
    return sorted(found, key=str)


def _spans(name: str) -> list[range]:
    return [SPANS[PREFIX + each] for each in READERS[name] if PREFIX + each in SPANS]


class _Finder(MetaPathFinder):
    """Finds the readers' modules, and gives them a loader that counts statements."""

    def __init__(self) -> None:
        self._names = {PREFIX + name for names in READERS.values() for name in names}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # never from a file of compiled code
        tree = ast.parse(self.get_data(self.path))
        first = max((span.stop for span in SPANS.values()), default=0)
        counter = _Counter(first)
        code: CodeType = compile(counter.visit(tree), self.path, "exec", dont_inherit=True)
        assert counter.number <= MOST
        SPANS[fullname], CONSTANTS[fullname] = range(first, counter.number), counter.constants
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__hits__"] = HITS
        super().exec_module(module)


class _Counter(ast.NodeTransformer):
    """Puts a mark before each statement in functions, and collects constants."""

    def __init__(self, first: int) -> None:
        self.number, self.constants, self._inside = first, set[int | bytes](), False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        outside, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = outside
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody") if self._inside else ():
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.ClassDef):
                setattr(node, field, [each for one in block for each in (*self._mark(one), one)])
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if type(value) is int and abs(value) > 8:
            self.constants.add(value)
        elif isinstance(value, str | bytes) and 0 < len(value) <= 40 and "\n" not in str(value):
            self.constants.add(value.encode() if isinstance(value, str) else value)
        return node

    def _mark(self, before: ast.stmt) -> list[ast.stmt]:
        if isinstance(before, ast.Global | ast.Nonlocal):
            return []
        mark = ast.parse(f"__hits__[{self.number}] = 1").body[0]
        self.number += 1
        for node in ast.walk(mark):
            ast.copy_location(node, before)
        return [mark]
