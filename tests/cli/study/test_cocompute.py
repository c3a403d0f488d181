"""`greenroom simulate --co-compute`: misses computed where they wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom.core.cost import Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.trace import save
from tests.cli.conftest import Run
from tests.options import needs_option
from tests.sim import small

pytestmark = needs_option("co_compute")

DISK, BUS = Route("disk", "host", Link(1e9)), Route("host", "device", Link(1e9))
ROW = ("--capacity", 6, "--expert-bytes", "1MB", "--json")


def work(seconds: float) -> Table:
    return Table((1 << 20,), (1, 64), ((seconds, 64 * seconds),))


def profile(path: Path, *places: str, host_s: float = 1e-3) -> Path:
    """A machine whose bus carries an expert in a millisecond."""
    named = {"device": ("gpu", 1e-5), "host": ("cpu", host_s)}
    processors = tuple(Processor(named[p][0], p, work(named[p][1]), work(1e-5)) for p in places)
    path.write_text(json.dumps(Machine((DISK, BUS), processors).as_json()))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    save(small.trace([[-4, *[1] * 20]] * 4, top_k=4), tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


def test_tokens_come_sooner_where_both_compute(cli: Run, recorded: Path, tmp_path: Path):
    machine = profile(tmp_path / "gpu.json", "device", "host")
    asked = ("simulate", recorded, "--policy", "lru", *ROW, "--machine", machine)
    asked = (*asked, "--host-capacity", "100%")
    alone, both = (cli(*asked, "--co-compute", how).json for how in ("off", "auto"))
    assert "on_host" not in alone
    assert 0 < both["on_host"] < both["requests"]
    assert both["tpot_mean_s"] < alone["tpot_mean_s"]
    machine = profile(tmp_path / "slow.json", "device", "host", host_s=1.0)
    slow = cli(*asked[:-3], machine, *asked[-2:], "--co-compute", "auto").json
    assert slow["on_host"] == 0


def test_named_systems_compute_where_it_is(cli: Run, recorded: Path, tmp_path: Path):
    machine = profile(tmp_path / "gpu.json", "device", "host")
    asked = ("simulate", recorded, *ROW, "--machine", machine, "--system", "fiddler,hybrimoe,llru")
    ran = cli(*asked, "--host-capacity", "100%")
    fiddler, hybrimoe, llru = json.loads(ran.out)
    assert fiddler["on_host"] > 0
    assert hybrimoe["on_host"] > 0
    assert "on_host" not in llru
    assert fiddler["without"] == []
    assert all("by the host's processor" not in what for what in hybrimoe["without"])
    alone = cli(*asked)
    assert "misses computed by the host's processor" in json.loads(alone.out)[0]["without"]
    off = cli(*asked, "--host-capacity", "100%", "--co-compute", "off")
    assert all("on_host" not in row for row in json.loads(off.out))


def test_what_cannot_be_shared_out_is_said(cli: Run, recorded: Path, tmp_path: Path):
    asked = ("simulate", recorded, "--policy", "lru", *ROW, "--co-compute")
    assert "--co-compute has an effect only with --machine" in cli(*asked, "auto").mistake
    both = profile(tmp_path / "gpu.json", "device", "host")
    assert "give --host-capacity" in cli(*asked, "auto", "--machine", both).mistake
    alone = profile(tmp_path / "alone.json", "device")
    failed = cli(*asked, "auto", "--machine", alone, "--host-capacity", "100%")
    assert "needs a machine with a CPU at its host memory" in failed.mistake
    assert "unknown co_compute 'on'" in cli(*asked, "on", "--machine", both).mistake
