"""`greenroom simulate --host-capacity`: experts kept between the disk and a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.config.scheduler import option_names
from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.trace import save
from tests.cli.conftest import Run
from tests.sim import small

WORK = Table((1 << 20,), (1,), ((1e-3,),))
DISK, BUS = Route("disk", "host", Link(1e9)), Route("host", "device", Link(1e10))
LRU = ("--policy", "lru", "--capacity", 6, "--expert-bytes", "1MB", "--json")


def profile(path: Path, *routes: Route) -> Path:
    path.write_text(
        json.dumps(Machine(routes, (Processor("p", routes[-1].target, WORK, WORK),)).as_json())
    )
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    save(small.trace([[-4, *[1] * 20]] * 4), tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


def test_what_the_host_keeps_need_not_come_from_the_disk(cli: Run, recorded: Path, tmp_path: Path):
    machine = profile(tmp_path / "gpu.json", DISK, BUS)
    asked = ("simulate", recorded, *LRU, "--machine", machine)
    rows = [cli(*asked).json]
    rows += [cli(*asked, "--host-capacity", kept).json for kept in ("6", "100%")]
    assert len({row["misses"] for row in rows}) == 1
    moved = [row["bytes_moved"] for row in rows]
    assert moved[0] > moved[1] > moved[2] > 0
    assert rows[0]["tpot_mean_s"] > rows[1]["tpot_mean_s"] > rows[2]["tpot_mean_s"]
    ahead = cli(*asked, "--host-capacity", "100%", "--prefetch", "oracle").json
    assert ahead["prefetches"] > 0


def test_it_is_of_memory_between_two_links(cli: Run, recorded: Path, tmp_path: Path):
    machine = profile(tmp_path / "cpu.json", DISK)
    asked = ("simulate", recorded, *LRU)
    failed = cli(*asked, "--machine", machine, "--host-capacity", "4")
    assert "the machine has 1 between the disk and this --processor" in failed.mistake
    failed = cli("simulate", recorded, *LRU[:4], "--host-capacity", "4")
    assert "--host-capacity has an effect only with --machine" in failed.mistake
    machine = profile(tmp_path / "gpu.json", DISK, BUS)
    failed = cli(*asked, "--machine", machine, "--host-capacity", "4,5")
    assert "--host-capacity 4,5: give one number or share" in failed.mistake


def test_experts_over_devices(cli: Run, recorded: Path, tmp_path: Path):
    machine = profile(tmp_path / "gpu.json", DISK, BUS)
    asked = ("simulate", recorded, *LRU, "--machine", machine, "--host-capacity", "100%")
    one, two = (cli(*asked, "--devices", n).json for n in (1, 2))
    assert one["requests"] == two["requests"]
    assert two["tpot_mean_s"] < one["tpot_mean_s"]
    ahead = cli(*asked, "--devices", 2, "--prefetch", "oracle").json
    assert ahead["prefetches"] > 0
    placed = {
        named: cli(*asked, "--devices", 2, "--device-placement", named).json
        for named in ("auto", "experts", "layers")
    }
    assert placed["auto"] == two == placed[two["device_placement"]]
    assert placed["experts"]["tpot_mean_s"] != placed["layers"]["tpot_mean_s"]
    for wrong, why in (
        (("--devices", 0), "--devices must be at least 1, got 0"),
        (("--devices", 99), "experts can be spread over 1 to"),
        (("--device-placement", "layers"), "--device-placement layers needs several devices"),
        (("--devices", 9, "--device-placement", "layers"), "MoE layers can be placed on 1 to"),
        (("--devices", 2, "--policy", "opt"), "policy opt must know all expert requests"),
        (("--devices", 2, "--pin", "none"), "--pin none does not work with prefetching"),
        (
            ("--devices", 2, "--capacity", 1),
            "devices need at least one slot each",
        ),
    ):
        assert why in cli(*asked, *wrong).mistake
    assert (
        "--devices has an effect only with"
        in cli("simulate", recorded, *LRU, "--devices", 2).mistake
    )


def test_split_experts_and_copies_between_two_links(cli: Run, tmp_path: Path):
    made = small.trace([[-4, *[1] * 20]] * 4)
    weights = np.random.default_rng(0).random(made.experts.shape).astype(np.float16)
    save(replace(made, weights=weights), tmp_path / "small.safetensors")
    asked = (
        "simulate", tmp_path / "small.safetensors", *LRU,
        "--machine", profile(tmp_path / "gpu.json", DISK, BUS),
    )  # fmt: skip
    for options in (("--split", "0.5"), ("--miss-precision", "int4"), ("--skip-below", "0.2")):
        if options[0] != "--split" and option_names().count(options[0][2:].replace("-", "_")) == 0:
            continue
        rows = [cli(*asked, *options, "--host-capacity", n).json for n in ("1", "6", "100%")]
        moved = [row["bytes_moved"] for row in rows]
        assert moved[0] > moved[1] > moved[2] > 0
        assert rows[0]["tpot_mean_s"] > rows[1]["tpot_mean_s"] > rows[2]["tpot_mean_s"]
    failed = cli(*asked, "--split", "0.5,0.75", "--scope", "per-layer", "--host-capacity", "1")
    assert "host memory has room for 1 experts, but needs room for 2" in failed.mistake
    nested = ("--miss-precision", "int4", "--nested", "--host-capacity", "6")
    if "miss_precision" in option_names():
        assert "nested copies (--nested, or" in cli(*asked, *nested).mistake
