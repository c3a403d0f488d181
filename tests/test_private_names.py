"""Names of other packages that Greenroom imports: a release that removes one fails by its name.

The list is read from the sources, so it is complete. Names below `numba.core`, in private modules
or with an underscore have no promise to stay; tests/hf/model/test_canaries.py has what those of
transformers must do besides.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN = {*sys.stdlib_module_names, "greenroom"}
Names = dict[tuple[str, str], list[str]]


def names_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules with the names that a file imports from them, or reads as `module.name`."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in modules:
                yield modules[name], node.attr


def used_names() -> Names:
    """Modules and names that the package uses of others, with the files that need them."""
    names: Names = defaultdict(list)
    for path in sorted((ROOT / "src/greenroom").rglob("*.py")):
        for module, name in dict.fromkeys(names_in(ast.parse(path.read_text()))):
            if module.split(".")[0] not in OWN:
                names[module, name].append(str(path.relative_to(ROOT)))
    return names


NAMES = used_names()


@pytest.mark.parametrize("module", sorted({module for module, _ in NAMES}))
def test_the_names_of_a_module_are_there(module: str) -> None:
    if find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module.split('.')[0]} is not installed")
    wanted = {name: files for (of, name), files in NAMES.items() if of == module}
    gone = missing_names(module, wanted)
    assert not gone, f"{release_of(module)} lacks " + "; ".join(gone)


def missing_names(module: str, wanted: dict[str, list[str]]) -> list[str]:
    """Say which names a module lacks, and which files need each."""
    try:
        found = import_module(module)
    except ImportError as error:
        needing = sorted({file for files in wanted.values() for file in files})
        return [f"{module} ({error}), which {', '.join(needing)} needs"]
    return [
        f"{module}.{name}, which {', '.join(files)} needs"
        for name, files in wanted.items()
        if not hasattr(found, name) and _no_module(f"{module}.{name}")
    ]


def release_of(module: str) -> str:
    """Name the installed release that a module is from, as in `numba 0.62.0`."""
    package = module.split(".")[0]
    distribution = packages_distributions()[package][0]
    return f"{distribution} {version(distribution)}"


def test_a_missing_name_is_shown_with_the_release_and_the_files() -> None:
    gone = missing_names("numba.extending", {"intrinsic": ["a.py"], "nonesuch": ["a.py", "b.py"]})
    assert gone == ["numba.extending.nonesuch, which a.py, b.py needs"]
    (gone_module,) = missing_names("numba.nonesuch", {"x": ["a.py"]})
    assert "numba.nonesuch (No module named 'numba.nonesuch')" in gone_module
    assert release_of("numba.extending") == f"numba {version('numba')}"


def _no_module(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


def test_the_list_has_private_names() -> None:
    private = {f"{module}.{name}" for module, name in NAMES if "_" in (module[0], name[0])}
    assert "numba.extending._Intrinsic" in private
    assert "transformers.modeling_utils._get_dtype" in private
    assert "torch._assert_async" in private
