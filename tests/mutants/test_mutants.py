"""Each parser has a seeded defect, and its fuzzer finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.mutants import SHOWN_BY
from tests.fuzz.fuzzer import FORMATS
from tests.fuzz.readers import READERS
from tests.mutants.patches import PACKAGE, ROOT, changed, check_applies, patches


def test_every_parser_has_a_defect() -> None:
    assert set(patches("fuzz")) == set(FORMATS) == set(READERS)


@pytest.mark.parametrize("name", patches("fuzz"))
def test_a_patch_applies_to_the_parser(name: str, tmp_path: Path) -> None:
    """To a file that the coverage of this parser counts."""
    patch = patches("fuzz")[name]
    (file,) = changed(patch)
    check_applies(patch, tmp_path)
    module = file.removeprefix(f"{PACKAGE}/").removesuffix(".py").replace("/", ".")
    assert module in READERS[name]


@pytest.mark.parametrize("name", patches("faults"))
def test_a_fault_applies(name: str, tmp_path: Path) -> None:
    assert set(SHOWN_BY) == set(patches("faults"))
    check_applies(patches("faults")[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_fuzzers_find_the_defects() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
