"""A digest changes with what a function is compiled from, and with nothing else."""

from __future__ import annotations

import ast
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from greenroom.core.compiling.function_digest import FunctionDigest

SOURCE = '''
from __future__ import annotations
import math
from typing import NamedTuple
import numpy as np
from numba import njit

SCALE = 3
TABLE = {"a": 1, "b": (2.0, None)}
ONE = np.float32(1)

class Own(NamedTuple):
    first: int

    def twice(self):
        return 2 * self.first

def helper(x):
    return x + SCALE

@njit(nogil=True)
def compiled(x):
    return helper(x) * ONE

def unrelated(x):
    return x

def factory(power):
    def made(x):
        return x**power
    return made

made = factory(2)

def root(x: int, y=1) -> float:
    """What it does."""
    if x in {1, 2}:
        return compiled(x) + made(y)
    return math.sqrt(Own(x).twice()) + TABLE["a"]
'''


def digest(source: str) -> str:
    module = ModuleType("greenroom_digest_example")
    exec(compile(source, "<example>", "exec"), vars(module))
    return FunctionDigest.of(vars(module)["root"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 3", "SCALE = 3  # a comment"),
        ("\n\n", "\n\n\n\n"),
        ('"""What it does."""', '"""Something else."""'),
        ('    """What it does."""\n', ""),
        ("def helper(x):", 'def helper(x):\n    """Add."""'),
        ("x: int, y=1", "x: float, y=1"),
        ("    return x\n", "    return -x\n"),
        ("import math", "import math\nimport json\nOTHER = object()"),
    ],
)
def test_text_that_is_not_compiled_does_not_change_the_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 3", "SCALE = 4"),
        ("SCALE = 3", "SCALE = 3.0"),
        ("x + SCALE", "x - SCALE"),
        ("helper(x) * ONE", "helper(x) / ONE"),
        ("nogil=True", "nogil=True, fastmath=True"),
        ("np.float32(1)", "np.float64(1)"),
        ('{"a": 1', '{"a": True'),
        ("(2.0, None)", "(2.5, None)"),
        ("factory(2)", "factory(3)"),
        ("2 * self", "3 * self"),
        ("    first: int", "    other: int\n    first: int = 0"),
        ("{1, 2}", "{1, 3}"),
        ("y=1", "y=2"),
        ("math.sqrt", "math.exp"),
        ("import math", "import cmath as math"),
    ],
)
def test_compiled_text_changes_the_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) != digest(SOURCE)


@pytest.mark.parametrize(
    ("name", "file", "followed"),
    [
        ("__main__", None, True),  # a notebook
        ("a_script", "/somewhere/a_script.py", True),
        ("a_package", "/venv/lib/python3.11/site-packages/a_package.py", False),
        ("a_library", f"{Path(ast.__file__).parent}/a_library.py", False),
        ("built_in", None, False),
    ],
)
def test_code_that_is_not_installed_is_followed(
    name: str, file: str | None, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content changes while its names and its package's version stay."""
    digests = []
    for source in (SOURCE, SOURCE.replace("x + SCALE", "x - SCALE")):
        module = ModuleType(name)
        if file is not None:
            module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, "<example>", "exec"), vars(module))
        caller = ModuleType("greenroom_caller")
        vars(caller)["compiled"] = vars(module)["compiled"]
        exec("def call(x):\n    return compiled(x)", vars(caller))
        digests.append(FunctionDigest.of(vars(caller)["call"]))
    assert (digests[0] != digests[1]) == followed


def test_copying_an_object_leaves_its_class_s_digest() -> None:
    """Copying and pickling leave a mark on the class."""
    module = ModuleType("greenroom_digest_example")
    exec(compile(SOURCE, "<example>", "exec"), vars(module))
    before = FunctionDigest.of(vars(module)["root"])
    copy.copy(vars(module)["Own"](1))
    assert "__slotnames__" in vars(vars(module)["Own"])
    assert FunctionDigest.of(vars(module)["root"]) == before


def test_an_object_without_portable_content_is_refused() -> None:
    with pytest.raises(TypeError, match="no digest of <object object at 0x"):
        digest(SOURCE.replace("SCALE = 3", "SCALE = object()"))


PRINTED = """
import json
from greenroom.core.cache.bound import bind
from greenroom.core.compiling.function_digest import FunctionDigest
from greenroom.policies import POLICIES
from greenroom.sim.replay import _bound_loop
found = {}
for name, policy in POLICIES.items():
    for function in (*bind(policy)[1:], _bound_loop(policy)):
        key = f"{name} {function.py_func.__name__}"
        found[key] = FunctionDigest.of(function.py_func)
print(json.dumps(found))
"""


def printed(source: Path) -> dict[str, str]:
    """Digests of Greenroom's compiled functions, by a process that runs these sources."""
    run = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(source)},
    )
    digests: dict[str, str] = json.loads(run.stdout)
    return digests


class OtherDocstrings(ast.NodeTransformer):
    """Other docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body: Any = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            first.value.value = "Something else.\n\nAnd more."
        return node


def test_docstrings_recompile_nothing_and_code_recompiles_its_callers(tmp_path: Path) -> None:
    """Sources without comments, with other docstrings and line breaks; then other code."""
    package = Path(FunctionDigest.add.__code__.co_filename).parents[2]
    shutil.copytree(package, tmp_path / "greenroom", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("core", "policies", "sim", "runtime/kernels"):
        for path in (tmp_path / "greenroom" / folder).rglob("*.py"):
            path.write_text(ast.unparse(OtherDocstrings().visit(ast.parse(path.read_text()))))
    before = printed(package.parent)
    assert len(before) > 100
    assert printed(tmp_path) == before
    lists = tmp_path / "greenroom" / "policies" / "helpers" / "lists.py"
    text = lists.read_text()
    assert "lists.after[" in text
    lists.write_text(text.replace("lists.after[", "lists.after[0 + ", 1))
    now = printed(tmp_path)
    changed = {key.partition(" ")[0] for key in before if before[key] != now[key]}
    assert {"lru", "llru", "opt"} <= changed
    assert not changed & {"random", "next-use", "compute_group", "attend"}
