"""The list of wheels: complete by trying it, and no longer than a machine needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.gpu_report.conftest import FOLDER

ROOT = FOLDER.parents[1]
IMPORTS = """
import sys
sys.path[:0] = [{folder!r}, {replay!r}]
import greenroom.hf.load.load, greenroom.cli.run, greenroom.runtime.kernels.triton
import greenroom.hf.load, greenroom.cli.run, greenroom.runtime.kernels.triton
import pytest, xdist, pytest_timeout, tests.gpu.conftest, tests.gpu.test_models
import __main__, page, worker, kernel_cells, model_cells, demo_cells, test_cells
"""


@pytest.mark.slow  # a process that imports everything
def test_the_list_is_all_that_is_imported(report, tmp_path: Path) -> None:
    """An environment of these packages, torch's and Triton's alone runs the report's imports."""
    wheels = report("wheels")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    there = wheels.needed(map(wheels.Requirement, wheels.PREINSTALLED), python)
    for name in {**wheels.requirements(python), **there}:
        own = distribution(name)
        for entry in {path.parts[0] for path in own.files or () if path.parts[0] != ".."}:
            target = tmp_path / entry
            if not target.exists() and entry != "__pycache__":
                target.symlink_to(Path(str(own.locate_file(entry))))
    code = IMPORTS.format(folder=str(FOLDER), replay=str(FOLDER.parent / "replay"))
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT)))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_only_what_a_machine_lacks_is_listed(report) -> None:
    wheels = report("wheels")
    needs = wheels.requirements()
    assert {"transformers", "numba", "llvmlite", "pytest-xdist"} <= set(needs)
    assert not {"torch", "numpy", "triton", "sympy"} & set(needs)
    have = "\n".join(wheels.pinned(sorted(needs))).replace("==5.23.0", "==5.17.0")
    assert wheels.lacking(needs, have) == ["transformers"]
    assert wheels.lacking(needs, "") == sorted(needs)


def test_every_version_comes_from_the_constraints(report, tmp_path) -> None:
    wheels = report("wheels")
    names = wheels.pinned(sorted(wheels.requirements()))
    assert all("==" in name for name in names)
    line = wheels.command(names, tmp_path, "3.12")
    assert line[-len(names) :] == names
    assert "--no-deps" in line
    with pytest.raises(SystemExit, match="pins no version of such-a-thing"):
        wheels.pinned(["such-a-thing"])
