"""The verdict over a server in a cgroup, and a short run of one model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import harness
from tests.memory.mutants import SHOWN_BY
from tests.memory.run import MIB, SHAPES, Found, growth, run
from tests.memory.server import CgroupError, memory_cgroup
from tests.mutants.patches import check_applies, patches

GOOD = Found(240, 800 * MIB, 790 * MIB, 0.002, -0.3, ())
TAKE = "memory = bytearray(256 << 20)"


def test_every_model_has_a_miniature() -> None:
    with harness.as_program(harness.FOLDER / "shapes.py", []):
        import shape_table

        assert set(shape_table.SHAPES) == set(SHAPES)


def test_growth_is_that_of_a_line_after_the_warm_up() -> None:
    assert growth([1, 1, *[100] * 8]) == pytest.approx(0)
    assert growth([5] * 25 + [*range(1000, 1100)]) == pytest.approx(0.099)
    # Readings that go up and down, two of which would say that the memory grew by 2 %.
    assert abs(growth([100, 102, 98, 101] * 50 + [100, 102])) < 0.001
    assert growth([]) == growth([7]) == 0


@pytest.mark.parametrize(
    ("found", "failure"),
    [
        (GOOD, None),
        (replace(GOOD, peak=801 * MIB), "801.0 MiB of --memory 800 MiB"),
        (replace(GOOD, rss_growth=0.0101), "the memory of the process grew by 1.01%"),
        (replace(GOOD, usage_growth=0.5), "the memory of the cgroup grew by 50.00%"),
        (replace(GOOD, wrong=("request 3: 503",)), "request 3: 503"),
    ],
)
def test_a_broken_promise_is_named(found: Found, failure: str | None) -> None:
    assert found.failures == ([] if failure is None else [failure])


def test_a_cgroup_counts_what_the_kernel_ends() -> None:
    try:
        with memory_cgroup(64 << 20) as group:
            enter = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group.procs)]
            done = subprocess.run([*enter, sys.executable, "-c", "pass"], check=False)
            assert (done.returncode, group.kills()) == (0, 0)
            done = subprocess.run([*enter, sys.executable, "-c", TAKE], check=False)
            assert (done.returncode, group.kills()) == (-9, 1)
            assert group.usage_bytes() <= 64 << 20
    except CgroupError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", patches("memory"))
def test_a_defect_applies(name: str, tmp_path: Path) -> None:
    assert set(SHOWN_BY) == set(patches("memory"))
    check_applies(patches("memory")[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_stays_within_its_memory() -> None:
    """Too short for a judgement of its growth."""
    try:
        found = run("qwen3-30b-a3b", "gguf", 40, 0)
    except CgroupError as error:
        pytest.skip(str(error))
    assert replace(found, rss_growth=0.0, usage_growth=0.0).failures == []
    assert found.requests == 40
    assert found.peak > 0.8 * found.limit  # the budget was used
