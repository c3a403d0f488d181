"""`greenroom doctor MODEL --gpu CARD`: a machine that nobody measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import greenroom.cli.doctor  # noqa: F401, before a fixture replaces what it imports
from greenroom.cli.estimate import machine
from greenroom.cli.estimate.card import fit, recommendation
from greenroom.cli.estimate.machine import default_profile
from greenroom.config import LoadConfig
from greenroom.core.cost import Link, Work
from greenroom.core.machine import Machine, Processor
from greenroom.hf.load.describe import describe
from greenroom.plan.cards import host_work, table
from greenroom.plan.cards.machine import HOST_SHARE, PCIE_SHARE, Host, predict_machine
from greenroom.plan.cards.table import find_card, load_cards
from tests.cli.conftest import Run
from tests.models import cached_tiny
from tests.options import needs_option
from tests.plan.models import MACHINE

HOST = ("--memory", "64GiB", "--memory-bandwidth", "80GB", "--disk-speed", "5GB")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a profile; a measurement of this machine fails the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("this machine was measured")

    monkeypatch.setattr(machine, "measure", measure)
    return tmp_path


def test_what_is_predicted_and_assumed_is_said(cli: Run, folder: Path, home: Path):
    ran = cli("doctor", folder, "--gpu", "geforce rtx4090", *HOST)
    assert ran.code == 0, ran.err
    for shown in (
        "This is a prediction from data sheets; nothing was measured on a RTX 4090",
        "24 GiB at 1,008 GB/s, of which 70% are assumed, as other engines reach",
        "PCIe 4x16 at 23.6 GB/s, 75% of the data sheet",
        "64 GiB of memory at 60.0 GB/s, disk at 5.00 GB/s",
        "Python takes 0.71 ms a layer, 0.03 ms where the layer is one graph, and 0.08 ms more if"
        " experts are missing (0.5 with --co-compute auto)",
        "The pass of a token is one CUDA graph",
        "experts fit in the card's memory",
        "routing: synthetic",
    ):
        assert shown in ran.out
    header, _, *rows = ran.out.split("\n\n")[2].splitlines()
    assert header.split()[:4] == ["misses", "tokens/s", "range", "TPOT"]
    assert [row.split()[0] for row in rows] == ["none"]
    assert not list(home.rglob("machine.json"))  # this machine's profile is another one


def test_the_profile_is_one_that_plan_takes(cli: Run, folder: Path, tmp_path: Path):
    profile = tmp_path / "card.json"
    ran = cli("doctor", folder, "--gpu", "t4", "--pcie", "3x8", *HOST, "--json", "-o", profile)
    assert ran.code == 0, ran.err
    shown = ran.json
    assert (shown["gpu"], shown["predicted"], shown["shared"]) == ("T4", True, None)
    assert shown["capacity"] == shown["host_capacity"] == 16
    assert shown["moved"]["tpot_s"] > 0
    assert shown["machine"] == json.loads(profile.read_text())
    disk, bus = (route.link for route in Machine.load(profile).routes)
    assert disk.bandwidth == 5e9
    assert bus.bandwidth == pytest.approx(PCIE_SHARE * 0.985e9 * 8)
    planned = cli("plan", folder, "--memory", "8GiB", "--machine", profile, "--json")
    assert planned.code == 0, planned.err
    assert "gpu computes" in planned.json["machine"]


def test_what_is_not_given_is_as_this_machine_has_it(cli: Run, folder: Path, home: Path):
    (home / "greenroom").mkdir()
    (home / "greenroom" / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    host = cli("doctor", folder, "--gpu", "4090", "--memory-bandwidth", "80GB", "--json").json[
        "machine"
    ]
    assert host["host"]["memory_bytes"] == MACHINE.host["memory_bytes"]
    assert host["links"][0]["bandwidth"] == MACHINE.routes[0].link.bandwidth
    (cpu, _) = host["processors"]
    assert cpu["expert"]["nbytes"][0] / cpu["expert"]["seconds"][0][0] == pytest.approx(
        HOST_SHARE * 80e9
    )
    host = cli("doctor", folder, "--gpu", "4090", "--json").json["machine"]
    (cpu, _) = host["processors"]
    assert cpu["expert"]["nbytes"][0] / cpu["expert"]["seconds"][0][0] == pytest.approx(2e10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpu", "4091"), "unknown graphics card '4091': choose one of RTX 4090, "),
        (("--gpu", "a100"), "graphics card 'a100' fits several cards: choose one of A100 40GB"),
        (("--gpu", "4090", "--pcie", "7x16"), "--pcie is '7x16': write generation and lanes"),
        (("--gpu", "4090", "--memory", "50%"), "--memory must be a size, as 64GiB, got '50%'"),
        (("--gpu", "4090", "--memory-bandwidth", "1%"), "--memory-bandwidth must be bytes a sec"),
        (("--gpu", "4090", "--disk-speed", "fast"), "--disk-speed is 'fast': write bytes"),
        (("--gpu", "4090", "--quick"), "--quick and --path measure this machine: leave them out"),
        (("--memory", "8GiB"), "--memory describes the machine of --gpu: give --gpu CARD too"),
        (("--num-gpus", 2), "--num-gpus describes the machine of --gpu: give --gpu CARD too"),
        (("--gpu", "t4", "--num-gpus", 0), "--num-gpus must be at least 1, got 0"),
        (("--pcie", "4x8"), "--pcie describes the machine of --gpu: give --gpu CARD too"),
    ],
)
def test_wrong_values_get_one_line(cli: Run, folder: Path, options: tuple[str, ...], said: str):
    assert said in cli("doctor", folder, *options).mistake


def test_a_predicted_machine_does_not_replace_this_one_s_profile(cli: Run, folder: Path):
    profile = default_profile()
    for output in (profile, profile.parent / ".." / profile.parent.name / profile.name):
        ran = cli("doctor", folder, "--gpu", "t4", *HOST, "--output", output)
        assert "is this machine's profile: name another file" in ran.mistake
    assert not profile.exists()


def test_several_cards_have_a_placement(cli: Run, folder: Path):
    ran = cli("doctor", folder, "--gpu", "t4", "--num-gpus", 2, *HOST)
    assert ran.code == 0, ran.err
    assert "all 16 experts fit in the memory of 2 cards." in ran.out
    assert "placement: whole layers on each GPU: a token's experts take about" in ran.out
    assert "CUDA graph" not in ran.out
    shown = cli("doctor", folder, "--gpu", "t4", "--num-gpus", 2, *HOST, "--json").json
    assert (shown["num_gpus"], shown["device_placement"], shown["token_graph"]) == (
        2, "layers", False,
    )  # fmt: skip
    one = cli("doctor", folder, "--gpu", "t4", *HOST, "--json").json
    assert (one["num_gpus"], one["device_placement"], one["token_graph"]) == (1, None, True)


def test_a_model_without_a_graph_is_named(cli: Run):
    ran = cli("doctor", cached_tiny("qwen3_next"), "--gpu", "t4", *HOST)
    assert ran.code == 0, ran.err
    assert "The pass of a token is no CUDA graph: this model has none." in ran.out


def test_a_token_in_pieces_is_said() -> None:
    from tests.plan.cards.test_predict import COSTS, MODEL, prediction

    pieces = replace(COSTS, pieces=COSTS.dense)
    for costs, said in ((COSTS, False), (pieces, True)):
        lines = fit(MODEL, prediction(48, MODEL.experts, costs), 1)
        assert ("The pass of a token is one CUDA graph for each layer." in lines) == said


@needs_option("co_compute")
def test_co_computing_is_recommended_where_tokens_are_surely_faster() -> None:
    """The host takes 2 ms for an expert that needs 4 ms to move, or 9 ms."""
    from tests.plan.cards.test_predict import COSTS, MODEL, prediction

    (line, _) = recommendation(prediction(16, MODEL.experts))
    assert re.match(r"recommended: --co-compute auto, with \d+% less time a token in this", line)
    slow = replace(COSTS, host=Work.constant(9e-3))
    assert recommendation(prediction(16, MODEL.experts, slow)) == []
    assert recommendation(prediction(MODEL.experts, 0)) == []


@needs_option("co_compute")
def test_misses_are_moved_or_shared(cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A card whose memory holds 10 of 16 experts beside the rest, which may take 80 % of it."""
    model = describe(str(folder), LoadConfig(), on_a_gpu=True)
    memory = int(1.25 * (model.fixed_bytes + 10 * model.slot_bytes + model.full_bytes) + 4)
    small = replace(find_card("t4"), name="T4 small", memory=memory)
    monkeypatch.setattr(table, "load_cards", lambda: (small,))
    ran = cli("doctor", folder, "--gpu", "t4 small", *HOST)
    assert ran.code == 0, ran.err
    rows = ran.out.split("\n\n")[2].splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["moved to the card", "--co-compute auto"]
    assert all(row.endswith("%") for row in rows)
    assert re.search(r"1\d of 16 experts fit in 80 % of the card's memory, 16 in 80 %", ran.out)
    shown = cli("doctor", folder, "--gpu", "t4 small", *HOST, "--json").json
    assert 0 < shown["moved"]["miss_ratio"] < 1
    assert shown["shared"]["co_compute"] == "auto"
    assert (shown["token_graph"], shown["token_in_pieces"]) == (False, True)


def measured_machine(memory: int) -> Machine:
    """A machine whose GPU was measured, with so many bytes: times without the host's work."""
    small = replace(find_card("t4"), name="T4 small", memory=memory)
    machine = predict_machine(small, Host(8 << 30, 60e9, Link(3e9, 1e-4, 4)))
    cpu, gpu = machine.processors
    gpu = Processor(gpu.name, gpu.memory, gpu.expert, gpu.dense)
    rates = {"pinned": 12e9, "pageable": 6e9, **machine.measured["device"]}
    return replace(machine, processors=(cpu, gpu), measured={"device": rates})


@needs_option("co_compute")
def test_the_gpu_of_this_machine_is_predicted_too(cli: Run, folder: Path, home: Path):
    """10 of 16 experts fit; what was measured of the machine decides about co-computing."""
    model = describe(str(folder), LoadConfig(), on_a_gpu=True)
    memory = int(1.25 * (model.fixed_bytes + 10 * model.slot_bytes + model.full_bytes) + 4)
    profile = home / "greenroom" / "machine.json"
    profile.parent.mkdir(exist_ok=True)
    profile.write_text(json.dumps(measured_machine(memory).as_json()))
    ran = cli("doctor", folder)
    assert ran.code == 0, ran.err
    part = ran.out.split("with the GPU, as measured:")[1]
    assert re.search(r"1\d of 16 experts fit in 80 % of the card's memory, 16 in 80 %", part)
    assert "The pass of a token is one CUDA graph for each layer." in part
    assert re.search(r"^moved to the card .*\n--co-compute auto ", part, re.M)
    shown = cli("doctor", folder, "--json").json["gpu"]
    layers = model.layers
    assert shown["moved"]["tpot_s"] > layers * host_work.PIECE
    assert shown["shared"]["co_compute"] == "auto"
    profile.write_text(json.dumps(measured_machine(1 << 20).as_json()))
    assert "the GPU is too small: " in cli("doctor", folder).out
    assert cli("doctor", folder, "--json").json["gpu"] == {"moved": None, "shared": None}
    profile.write_text(json.dumps(MACHINE.as_json()))  # has no GPU
    assert "GPU" not in cli("doctor", folder).out
    assert cli("doctor", folder, "--json").json["gpu"] is None


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    small = replace(find_card("t4"), name="T4 small", memory=1 << 20)
    monkeypatch.setattr(table, "load_cards", lambda: (small,))
    said = cli("doctor", folder, "--gpu", "t4 small", *HOST).mistake
    assert "MiB of the card's memory" in said
    assert said.endswith("80% of a T4 small's are 819 KiB")


def test_a_card_alone_is_no_question(cli: Run):
    assert "--gpu predicts the speed of a model: name one" in cli("doctor", "--gpu", "t4").mistake


def test_the_cards_are_listed(cli: Run):
    ran = cli("list", "--gpus")
    names = [line.split("  ")[0] for line in ran.out.splitlines()[2:]]
    assert names == [card.name for card in load_cards()]
    rows = json.loads(cli("list", "--gpus", "--json").out)
    assert [row["name"] for row in rows] == names
    assert all(row["source"].startswith("NVIDIA ") for row in rows)
    assert "leave out MODEL" in cli("list", "owner/name", "--gpus").mistake
