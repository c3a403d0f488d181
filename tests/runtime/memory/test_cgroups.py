"""Memory cgroups of a made-up system: limits, free memory, and limits that were reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.runtime.memory.cgroups import memory_cgroups

MIB = 1 << 20


def write_group(folder: Path, **files: Any) -> Path:
    """Write the control files of a cgroup; `stat` is a dict."""
    folder.mkdir(parents=True, exist_ok=True)
    stat = files.pop("stat", {})
    files["stat"] = "\n".join(f"{name} {value}" for name, value in stat.items())
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n" if value != "" else "")
    return folder


@pytest.fixture
def v2(tmp_path: Path) -> Any:
    """A process in the cgroup /app/job of cgroup v2; the groups are written by the test."""
    membership = tmp_path / "cgroup"
    membership.write_text("0::/app/job\n")
    root = tmp_path / "fs"
    write_group(root / "app", max="max", current=0)
    return lambda: memory_cgroups(membership, root), root / "app/job"


def test_page_cache_is_free_and_shared_memory_is_not(v2: Any) -> None:
    read, job = v2
    stat = {"file": 300 * MIB, "shmem": 100 * MIB, "slab_reclaimable": 20 * MIB, "anon": 80 * MIB}
    write_group(job, max=1000 * MIB, high="max", current=400 * MIB, stat=stat)
    assert [each.free_bytes() for each in read()] == [820 * MIB, None, None]


def test_the_limit_that_slows_processes_down_counts(v2: Any) -> None:
    read, job = v2
    write_group(job, max=1000 * MIB, high=500 * MIB, current=400 * MIB)
    assert read()[0].free_bytes() == 100 * MIB
    write_group(job, max=1000 * MIB, high=300 * MIB, current=400 * MIB)
    assert read()[0].free_bytes() == 0


def test_an_ancestor_has_its_own_limit(v2: Any) -> None:
    read, job = v2
    write_group(job, max=1000 * MIB, current=400 * MIB)
    write_group(job.parent, max=900 * MIB, current=850 * MIB)
    assert [each.free_bytes() for each in read()] == [600 * MIB, 50 * MIB, None]


def test_limits_that_were_reached_are_counted(v2: Any) -> None:
    read, job = v2
    write_group(job, max=1, current=0, events="low 9\nhigh 2\nmax 3\noom 9")
    assert [each.limit_hits() for each in read()] == [5, 0, 0]


def test_cgroup_v1(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:cpu,memory:/job\n1:pids:/other\n0::/\n")
    job = write_group(
        tmp_path / "fs/memory/job",
        limit_in_bytes=1000 * MIB,
        usage_in_bytes=500 * MIB,
        failcnt=7,
        stat={"total_cache": 200 * MIB, "total_shmem": 50 * MIB, "cache": MIB},
    )
    groups = memory_cgroups(tmp_path / "cgroup", tmp_path / "fs")
    assert [each.folder for each in groups] == [job, job.parent, tmp_path / "fs"]
    assert [each.free_bytes() for each in groups] == [650 * MIB, None, None]
    assert groups[0].limit_hits() == 7


def test_a_system_without_cgroups_has_none(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path / "nothing", tmp_path) == []
