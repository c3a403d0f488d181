"""The range of transformers: the one in pyproject.toml, checked before anything is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import greenroom
from greenroom.errors import VersionError
from greenroom.hf import versions
from greenroom.hf.versions import check_transformers


def test_the_range_is_that_of_the_project_file() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    floor, ceiling = re.search(r'"transformers>=([\d.]+),<([\d.]+)"', project.read_text()).groups()
    assert floor == ".".join(map(str, versions.FLOOR))
    assert ceiling == ".".join(map(str, versions.CEILING))


@pytest.mark.parametrize("installed", ["5.22.9", "5.24.0", "6.0", "5.17.0"])
def test_another_version_is_refused_in_one_line(installed, monkeypatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: installed)
    with pytest.raises(VersionError, match=r">=5\.23,<5\.24: run pip install") as caught:
        check_transformers()
    assert installed in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("installed", ["5.23.0", "5.23.4", "5.23.0.dev0"])
def test_a_version_of_the_range_is_taken(installed, monkeypatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: installed)
    check_transformers()


def test_a_missing_transformers_is_named(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(VersionError, match="transformers is not installed: run pip install"):
        check_transformers()


def test_the_command_line_says_it_before_anything_is_imported(tmp_path) -> None:
    """A folder in front of the installed packages stands for an older transformers."""
    (tmp_path / "transformers-5.17.0.dist-info").mkdir()
    (tmp_path / "transformers-5.17.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n"
    )
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("raise RuntimeError('imported')\n")
    source = Path(greenroom.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "greenroom", "run", "demo", "hi"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(source)])},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "greenroom: transformers 5.17.0 is installed, but Greenroom needs"
        " transformers>=5.23,<5.24: run pip install 'transformers>=5.23,<5.24'"
    ]
