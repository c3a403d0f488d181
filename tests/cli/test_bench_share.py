"""`greenroom bench --share`: a report for a public table, with nothing private in it."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import greenroom
from greenroom.cli.estimate.machine import default_profile
from greenroom.config import BUDGETS
from greenroom.core.machine import Machine
from greenroom.runtime.measure.bandwidth import host_facts
from tests.cli.conftest import Run
from tests.plan.models import MACHINE

SHORT = ("--rounds", 2, "--tokens", 16, "--kernels", "eager", "--raw")
SECRET = "jane-doe-secret"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def object_of(text: str) -> dict[str, Any]:
    """The JSON object of a report in Markdown, whose other part are tables."""
    tables, block = re.fullmatch(r"(.*)\n\n```json\n(.*)\n```\n", text, re.DOTALL).groups()
    assert all(line.startswith("| ") for line in tables.splitlines()[:11])
    return json.loads(block)


def test_a_report_has_machine_model_settings_and_figures(cli: Run, folder: Path):
    ran = cli("bench", folder, "--share", "--cache", "50%", "--read-limit", "200MB", *SHORT)
    assert ran.code == 0, ran.err
    report = object_of(ran.out)
    assert report["format"] == "greenroom-benchmark"
    assert report["greenroom"] == greenroom.__version__
    facts = host_facts()
    assert report["machine"] == {
        "cpu": facts["cpu"], "cores": os.cpu_count(), "instructions": facts["instructions"],
        "memory_bytes": facts["memory_bytes"], "disk_bytes_per_s": None, "gpus": [],
        "system": report["machine"]["system"],
    }  # fmt: skip
    model = report["model"]
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (model["architecture"], model["nbytes"]) == ("Qwen3MoeForCausalLM", weights)
    assert (model["format"], model["layers"], model["experts"]) == ("safetensors float32", 2, 16)
    assert 0.95 * weights < 4 * model["parameters"] <= weights
    assert model["experts_in_memory"] == 8
    assert report["settings"] == {
        "--cache": "50%", "--read-limit": "200MB", "--kernels": "eager", "--raw": True,
        "--tokens": 16, "--rounds": 2,
    }  # fmt: skip
    (row,) = report["systems"]
    assert (row["name"], row["rounds"]) == ("greenroom", 2)
    for name in ("tokens_per_s", "tpot_s", "ttft_s", "hit_ratio", "bytes_per_token"):
        middle, low, high = row[name]
        assert 0 < low <= middle <= high
    assert row["tokens_per_s"][0] == pytest.approx(1 / row["tpot_s"][0])
    assert row["hit_ratio"][2] <= 1
    for shown in ("| disk | not measured |", "| GPU | none |", "| experts in memory | 8 of 16 (2"):
        assert shown in ran.out


def test_nothing_private_is_in_a_report(
    cli: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model, prompts and sizes of layers in files with private names, and a secret variable."""
    private = tmp_path / SECRET
    shutil.copytree(folder, private / f"model-of-{SECRET}")
    (private / "prompts.txt").write_text(f"{SECRET} asks\n")
    sizes = {"format": BUDGETS, "version": 1, "slots": [3, 5], "split": [0.5, 0.75]}
    (private / f"{SECRET}.json").write_text(json.dumps(sizes))
    monkeypatch.setenv("GREENROOM_API_KEY", SECRET)
    monkeypatch.chdir(private)
    files = ("--prompts", "prompts.txt", "--scope", f"{SECRET}.json")
    for output in ((), ("--json",)):
        ran = cli("bench", f"model-of-{SECRET}", "--share", "--cache", "50%", *files, *SHORT,
                  *output)  # fmt: skip
        assert ran.code == 0, ran.err
        report = json.loads(ran.out) if output else object_of(ran.out)
        assert report["settings"]["--scope"] == report["settings"]["--prompts"] == "(a file)"
        names = (SECRET, "jane", str(Path.home()), str(tmp_path), "prompts.txt", "/tmp")
        machine = (socket.gethostname(), platform.node(), getpass.getuser())
        for name in names:
            assert name not in ran.out
        for name in filter(None, machine):
            assert not re.search(rf"\b{re.escape(name)}\b", ran.out)
        assert "/" not in ran.out.replace("tokens/s", "").replace("GB/s", "")


def test_the_disk_is_that_of_this_machines_profile_alone(cli: Run, folder: Path):
    default_profile().parent.mkdir(parents=True)
    own = Machine(MACHINE.routes, MACHINE.processors, host_facts(), {})
    for machine, speed in ((MACHINE, None), (own, MACHINE.routes[0].link.bandwidth)):
        default_profile().write_text(json.dumps(machine.as_json()))
        ran = cli("bench", folder, "--share", "--cache", "50%", "--json", *SHORT)
        assert json.loads(ran.out)["machine"]["disk_bytes_per_s"] == speed


def test_a_model_that_fits_is_shared_alone(cli: Run, folder: Path):
    ran = cli("bench", folder, "--share", "--cache", "100%", *SHORT)
    assert ran.code == 0, ran.err
    assert object_of(ran.out)["model"]["experts_in_memory"] == 16
    assert "experts of" in cli("bench", folder, "--cache", "100%", *SHORT).mistake


def test_other_systems_are_shared_if_they_are_named(cli: Run, folder: Path):
    systems = ("--system", "llru,moepic,greenroom")
    ran = cli("bench", folder, "--share", "--cache", "50%", *systems, *SHORT)
    assert [row["name"] for row in object_of(ran.out)["systems"]] == ["llru", "greenroom"]
    assert "moepic is left out" in ran.err
    assert "moepic" not in ran.out
