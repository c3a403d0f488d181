"""Import rules: pure folders need no torch, and --help imports nothing slow."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import greenroom

ROOT = Path(greenroom.__file__).parent
PURE = [
    "config",
    "errors",
    "core",
    "drawing",
    "policies",
    "predictors",
    "trace",
    "sim",
    "plan",
    "study",
]
HEAVY = ["torch", "transformers", "numpy", "numba", "safetensors", "huggingface_hub"]
EXTRA = ["pyarrow", "pandas", "matplotlib"]  # the extra `study`

WITHOUT = """
import sys
for name in {banned}:
    sys.modules[name] = None  # makes its import fail
import importlib
for name in {modules}:
    importlib.import_module(name)
"""
LIGHT = """
import sys
{statement}
found = [name for name in {heavy} if name in sys.modules]
assert not found, found
"""


def modules(folder: str) -> list[str]:
    """A pure module, and all that are in it."""
    name, path = f"greenroom.{folder}", ROOT / folder
    inside = pkgutil.walk_packages([str(path)], f"{name}.") if path.is_dir() else []
    return [name, *(module.name for module in inside)]


def python(code: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_pure_folders_import_without_torch() -> None:
    existing = [f for f in PURE if (ROOT / f).is_dir() or (ROOT / f"{f}.py").is_file()]
    assert {"config", "errors", "core", "policies", "predictors", "sim", "plan"} <= set(existing)
    names = [name for folder in existing for name in modules(folder)]
    python(WITHOUT.format(banned=["torch", "transformers", "safetensors"], modules=names))


@pytest.mark.parametrize(
    "statement",
    [
        "import greenroom",
        "import greenroom; greenroom.GreenroomError; dir(greenroom)",
        "from greenroom.cli import parser; parser()",
        "from greenroom.cli import main; main([])",
        "from greenroom.cli import main; assert main(['run', 'x', 'y', '--kernels', 'z']) == 2",
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(statement: str) -> None:
    python(LIGHT.format(statement=statement, heavy=HEAVY))


def test_studies_import_their_libraries_when_they_are_used() -> None:
    statement = "import greenroom; greenroom.simulate; from greenroom import study; study.sweep"
    python(LIGHT.format(statement=statement, heavy=EXTRA))


# Modules that a start of `greenroom run` does not need.
UNUSED_IN_RUN = [
    "torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor._api",
    "torch.distributed.checkpoint.metadata", "torch.distributed.fsdp.api", "triton", "scipy",
    "pandas", "pyarrow", "matplotlib", "rich", "pydantic", "starlette", "fastapi", "uvicorn",
    "prometheus_client", "llguidance", "greenroom.server", "greenroom.hf.pack",
    "greenroom.hf.measure",
]  # fmt: skip


def test_a_run_imports_nothing_that_it_does_not_need() -> None:
    statement = (
        "from greenroom.cli import main;"
        " sys.argv = ['greenroom', 'run', 'demo', 'a', '--max-new-tokens', '1'];"
        " assert main() == 0"
    )
    python(LIGHT.format(statement=statement, heavy=UNUSED_IN_RUN))


def test_public_names_exist() -> None:
    for name in greenroom.__all__:
        assert getattr(greenroom, name)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        greenroom.lod  # noqa: B018


def test_no_extra_is_needed_to_load_a_model():
    """As in an environment with the package alone."""
    extras = ("gguf", "fastapi", "uvicorn", "httptools", "llguidance", "prometheus_client",
              "pandas", "pyarrow", "matplotlib", "ray")  # fmt: skip
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({extras!r}))\n"
        "import greenroom.hf.load.attach, greenroom.hf.check.verify, greenroom.hf.pack.packing\n"
        "from greenroom.cli import parser\n"
        "parser()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
