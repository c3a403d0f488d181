"""Names of other packages that Greenroom imports: a release that removes one fails by its name.

The list is read from the sources, so it is complete. Names below `numba.core`, in private modules
or with an underscore have no promise to stay; tests/hf/model/test_canaries.py has what those of
transformers must do besides.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gguf", "huggingface_hub", "numba", "starlette", "torch", "transformers", "uvicorn")
Names = dict[tuple[str, str], list[str]]


def imported_names() -> Names:
    """Modules and names that the package imports from others, with the files that need them."""
    names: Names = defaultdict(list)
    for path in sorted((ROOT / "src/greenroom").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                module = node.module or ""
                if module.split(".")[0] in PACKAGES:
                    for alias in node.names:
                        names[module, alias.name].append(str(path.relative_to(ROOT)))
    return names


NAMES = imported_names()


@pytest.mark.parametrize("module", sorted({module for module, _ in NAMES}))
def test_the_names_of_a_module_are_there(module: str) -> None:
    if find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module.split('.')[0]} is not installed")
    wanted = {name: files for (of, name), files in NAMES.items() if of == module}
    try:
        found = import_module(module)
    except ImportError as error:
        pytest.fail(f"{module} is gone ({error}); it is needed in {wanted}")
    gone = {
        f"{module}.{name}": files
        for name, files in wanted.items()
        if not hasattr(found, name) and _no_module(f"{module}.{name}")
    }
    assert not gone, f"gone, and the files that need it: {gone}"


def _no_module(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


def test_the_list_has_private_names() -> None:
    private = {f"{module}.{name}" for module, name in NAMES if "_" in (module[0], name[0])}
    assert "numba.extending._Intrinsic" in private
    assert "transformers.modeling_utils._get_dtype" in private
