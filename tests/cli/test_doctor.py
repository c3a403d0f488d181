"""`greenroom doctor`: what it measures, where it saves it, and that the simulator takes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from greenroom.core.machine import Machine
from greenroom.hf.measure import dry_run
from greenroom.hf.measure.harness import Measurement
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.measure import doctor, expert_reads
from greenroom.runtime.measure import kernels as measure_kernels
from greenroom.trace import save
from tests.cli.conftest import Run
from tests.gguf_models import DATA as GGUF
from tests.sim import small


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Little of everything, and a home of its own."""
    monkeypatch.setattr(doctor, "QUICK", doctor.Effort(1 << 20, 1, 8 << 20, 0.01, 0.001))
    monkeypatch.setattr(doctor, "LEAST_BYTES", 8 << 20)
    for name in ("SHAPE", "SMALLEST"):
        monkeypatch.setattr(dry_run, name, dry_run.Shape(64, 64, 2, 8, 2, 64))
    for name, tokens in (("TOKENS", 12), ("SETTLE", 4)):
        monkeypatch.setattr(dry_run, name, tokens)
    monkeypatch.setattr(measure_kernels, "SHAPES", ((64, 64), (64, 128)))
    monkeypatch.setattr(measure_kernels, "DENSE", ((64, 64),))
    monkeypatch.setattr(measure_kernels, "WEIGHT_BYTES", 1 << 16)
    monkeypatch.setattr(measure_kernels, "TOKENS", (1, 4))
    monkeypatch.setattr(doctor.constants, "HF_HUB_CACHE", str(tmp_path / "hub" / "deeper"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_profile_that_the_simulator_takes(cli: Run, fast: Path):
    ran = cli("doctor", "--quick", "-o", fast / "m.json", "--json")
    assert ran.code == 0, ran.err
    assert f"saved to {fast / 'm.json'}" in ran.err
    assert ran.json == json.loads((fast / "m.json").read_text())
    machine = Machine.load(fast / "m.json")
    link = machine.routes[0].link
    reads = ran.json["measured"]["disk"]["reads"]
    assert link.bandwidth == max(read["bandwidth"] for read in reads)
    assert {(read["nbytes"], read["threads"]) for read in reads} == {
        (size << 10, threads) for size in (64, 256, 1024, 4096) for threads in (1, 2, 4)
    }
    assert all(s > 0 for row in machine.processors[0].expert.seconds for s in row)
    assert machine.host["cores"] == os.cpu_count()
    assert set(ran.json["measured"]["memory"]) == {"1", str(os.cpu_count())}
    save(small.trace([[-4, 1, 1]] * 3), fast / "t.safetensors")
    asked = ("--policy", "lru", "--capacity", 4, "--expert-bytes", "24KiB", "--json")
    row = cli("simulate", fast / "t.safetensors", *asked, "--machine", fast / "m.json").json
    assert row["seconds"] > 0
    assert [p.name for p in fast.iterdir() if p.name.startswith(".")] == []  # no test file left


def test_a_table_and_the_default_place(cli: Run, fast: Path):
    ran = cli("doctor", "--quick")
    assert ran.code == 0, ran.err
    for shown in (
        "memory read",
        "disk, GB/s",
        "4 threads",
        "cpu, one expert, ms",
        "estimates assume",
        f", kernels {library().variant}, ",
    ):
        assert shown in ran.out
    assert str(fast) in ran.out  # the folder that was measured
    Machine.load(fast / "cache" / "greenroom" / "machine.json")


def test_the_kernels_that_are_used_here_are_named(no_kernels: None, cli: Run, fast: Path):
    line = cli("doctor", "--quick").out.splitlines()[0]
    assert ", kernels eager (compiled kernels were not built), " in line


def test_the_machine_is_described_in_sentences(cli: Run, fast: Path):
    said = cli("doctor", "--quick").out
    for shown in ("loading it from the disk takes", "Memory delivers", "of memory were free"):
        assert shown in said


def test_a_device_is_in_the_profile(cli: Run, fast: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "gpu_engines", lambda: [Engine()])
    monkeypatch.setattr(dry_run, "DEVICES", {"host": "cpu", "device": "fake"})
    asked, measure = [], dry_run.measure

    def measured(
        model: str, shape: dry_run.Shape, device: str, *cases: list[dry_run.Case]
    ) -> list[Measurement]:
        asked.append(device)
        return measure(model, shape, device, *cases)

    monkeypatch.setattr(dry_run, "measure", measured)
    ran = cli("doctor", "--quick")
    assert ran.code == 0, ran.err
    for shown in ("from host memory, pinned", "from host memory, pageable", "its own memory",
                  "gpu, one expert, ms", "the host has"):  # fmt: skip
        assert shown in ran.out
    machine = Machine.load(fast / "cache" / "greenroom" / "machine.json")
    assert [route.target for route in machine.routes] == ["host", "device"]
    assert asked == ["cpu", "cpu", "fake", "fake"]  # two models on each


def test_without_a_gpu_no_device_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.gpu_engines() == []


def test_what_a_model_would_do(cli: Run, fast: Path, folder: Path):
    """The machine is measured once, and then known."""
    ran = cli("doctor", folder)
    assert ran.code == 0, ran.err
    assert "measuring it quickly" in ran.err
    for shown in (
        "all of it fits",
        "tokens/s",
        "recommended: greenroom run",
        "synthetic, with typical",
    ):
        assert shown in ran.out
    again = cli("doctor", folder, "--json")
    assert "measuring" not in again.err
    found = again.json
    assert found["fits"]
    assert found["least_memory"] < found["whole_memory"]
    tpots = [point["tpot_s"] for point in found["curve"]]
    assert min(tpots) > 0
    assert all(p["tpot_low_s"] < p["tpot_s"] < p["tpot_high_s"] for p in found["curve"])


@pytest.mark.parametrize(
    ("gain", "steady", "suggested"), [(0.2, True, True), (0.2, False, False), (0.05, True, False)]
)
def test_a_copy_is_suggested_where_it_is_read_faster(
    gain: float, steady: bool, suggested: bool, cli: Run, monkeypatch: pytest.MonkeyPatch
):
    reads = expert_reads.ExpertReads(3, 2e9, 2.4e9, gain, steady, 5 << 30)
    monkeypatch.setattr(expert_reads, "measure_expert_reads", lambda *given: reads)
    file = GGUF / "Q8_0.gguf"
    ran = cli("doctor", file)
    assert ran.code == 0, ran.err
    line = (
        "each expert lies in 3 ranges, read at 2.00 GB/s; one range each is read 20% faster:"
        f" greenroom run {file} --repack DIR makes such a copy in DIR, which needs 5 GiB of disk"
        " space"
    )
    assert (line in ran.out) == suggested
    assert ("--repack" in ran.out) == suggested
    assert cli("doctor", file, "--json").json["expert_reads"] == reads._asdict()


def test_a_model_that_is_nowhere(cli: Run, fast: Path):
    assert "HF_HUB_OFFLINE forbids" in cli("doctor", "nobody/nothing").mistake


def test_a_model_is_read_and_not_written_to(cli: Run, fast: Path, monkeypatch: pytest.MonkeyPatch):
    folders = []
    monkeypatch.setattr(dry_run, "with_dry_run", lambda m, folder: folders.append(folder) or m)
    model = fast / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(os.urandom(9 << 20))
    before = sorted(model.iterdir())
    ran = cli("doctor", "--quick", "--path", model, "-o", fast / "m.json", "--json")
    assert ran.json["measured"]["disk"]["path"] == str(model)
    assert sorted(model.iterdir()) == before
    assert model not in folders
    assert len(folders) == 1


def test_mistakes(cli: Run, fast: Path):
    (fast / "tiny.safetensors").write_bytes(b"x" * 4096)
    ran = cli("doctor", "--quick", "--path", fast / "tiny.safetensors")
    assert "has 0 MiB of weights: at least 8 MiB are needed" in ran.mistake
    assert "no such file or folder" in cli("doctor", "--path", fast / "none").mistake
    assert "there is no folder" in cli("doctor", "-o", fast / "none" / "m.json").mistake
    assert "it is a folder" in cli("doctor", "-o", fast).mistake


def test_no_room_for_a_test_file(cli: Run, fast: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "LEAST_BYTES", 1 << 60)
    assert "of free space: the disk test needs at least" in cli("doctor", "--quick").mistake
