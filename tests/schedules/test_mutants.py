"""Each seeded defect applies to the sources, and the scheduler finds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.patches import ROOT, check_applies, patches
from tests.schedules.mutants import MOST, SCENARIO_OF, search
from tests.schedules.scenarios import SCENARIOS


def test_every_defect_has_a_scenario() -> None:
    assert set(patches("schedules")) == set(SCENARIO_OF)
    assert set(SCENARIO_OF.values()) <= set(SCENARIOS)


@pytest.mark.parametrize("name", patches("schedules"))
def test_a_patch_applies(name: str, tmp_path: Path) -> None:
    check_applies(patches("schedules")[name], tmp_path)


@pytest.mark.process
def test_a_defect_is_found() -> None:
    """One of them; `make soak` looks for all."""
    command = [sys.executable, "-m", "tests.schedules.mutants", "host-done"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"found by schedule (\d+): ThreadFailed", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) <= MOST


def test_without_a_defect_nothing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    search("host-jobs")
    assert not capsys.readouterr().out
