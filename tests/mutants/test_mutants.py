"""Each parser has a seeded defect, and its fuzzer finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzzer import FORMATS
from tests.fuzz.readers import READERS
from tests.mutants.patches import PACKAGE, ROOT, changed, patches


def test_every_parser_has_a_defect() -> None:
    assert set(patches()) == set(FORMATS) == set(READERS)


@pytest.mark.parametrize("name", patches())
def test_a_patch_applies_to_the_parser(name: str, tmp_path: Path) -> None:
    """To a file that the coverage of this parser counts."""
    patch = patches()[name]
    (file,) = changed(patch)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=tmp_path, check=True)
    module = file.removeprefix(f"{PACKAGE}/").removesuffix(".py").replace("/", ".")
    assert module in READERS[name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_fuzzers_find_the_defects() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
