"""Low-precision misses as users see them; a run counts as simulate."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.config.base import Approximation
from greenroom.errors import OutputError
from greenroom.plan.history import files
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import load, stream
from tests.cli.conftest import Run
from tests.cli.study.test_split import ANSWER, COSTS, asked, prompts, source
from tests.options import needs_option
from tests.thresholds import config_of

pytestmark = needs_option("miss_precision")

__all__ = ["prompts", "source"]  # fixtures
LOW = ("--miss-precision", "int4", "--low-below", 0.9)


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from greenroom.hf.pack.packing import pack

    folder = tmp_path_factory.mktemp("low") / "pack"
    pack(str(source), folder, "same", precision="int4")
    return folder


def test_a_run_counts_what_simulate_counts(
    cli: Run, folder: Path, prompts: Path, tmp_path: Path
) -> None:  # fmt: skip
    out = tmp_path / "t"
    recorded = cli(
        "trace", "record", folder, "--prompts", prompts, "-o", out, "--cache", "50%",
        "--policy", "lru", "--weights", *LOW, *ANSWER,
    )  # fmt: skip
    assert recorded.code == 0, recorded.err
    assert "CHANGES THE OUTPUT" in recorded.err
    trace = load(out)
    from greenroom.hf.model.skeleton import ModelSkeleton

    catalog = ModelSkeleton.of(folder).catalog
    exact, low, _ = catalog.copy_bytes()
    found = simulate_events(
        trace, stream(trace, "runtime"), int(trace.offsets[-1]) // 2, policy("lru"), COSTS,
        exact[0], "off",
        EventOptions(config=config_of(Approximation(low=0.9)), low=low[0] / exact[0]),
    )  # fmt: skip
    assert asked(recorded.err) == (found.times.requests, found.times.misses)
    assert found.counts.low > 0


def test_packing_running_and_what_it_costs(
    cli: Run, source: Path, tmp_path: Path
) -> None:  # fmt: skip
    pack, text = tmp_path / "pack", tmp_path / "text"
    text.write_text("The green room is where the performers wait until it is their cue. " * 3)
    made = cli("pack", source, "-o", pack, "--experts", "int8", "--miss-precision", "int4")
    assert made.code == 0, made.err
    assert "int4 copies inside of them" in made.out
    ran = cli("run", pack, "hello", "--cache", "30%", *LOW, *ANSWER)
    assert ran.code == 0, ran.err
    assert "CHANGES THE OUTPUT" in ran.err
    assert "inexact: " in ran.err
    found = cli("run", pack, "hello", "--cache", "30%", *LOW, *ANSWER, "--json").json
    assert found["approximated"]["low"] > 0
    judged = cli("verify", pack, "--quality", text, "--cache", "30%", *LOW, "--tokens", 24,
                 "--json").json  # fmt: skip
    assert judged["original"] == judged["model"]
    assert judged["kl_mean"] > 1e-6
    assert 0 < judged["approximated"]["inexact_share"] < 1
    none = cli("verify", pack, "--quality", text, "--cache", "30%", "--skip-below", "1e-9",
               "--tokens", 24, "--json").json  # fmt: skip
    assert none["approximated"]["inexact_share"] == 0
    assert none["kl_mean"] == 0


def _full(*_: object) -> None:
    raise OutputError("cannot write: no space left on device")


def test_a_run_tells_what_was_measured_of_its_quality(
    cli: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.SWITCH, "on")
    text = tmp_path / "text"
    text.write_text("The green room is where the performers wait until it is their cue. " * 3)
    asked = ("run", folder, "hello", "--cache", "30%", *LOW, *ANSWER)
    before = cli(*asked)
    assert "greenroom verify" in before.err.splitlines()[-1]
    assert cli(*asked, "--json").json["quality"] is None
    judged = cli("verify", folder, "--quality", text, "--cache", "30%", *LOW, "--tokens", 24,
                 "--json").json  # fmt: skip
    monkeypatch.setattr("greenroom.hf.check.loss.files.update_records", _full)
    again = cli("verify", folder, "--quality", text, "--cache", "30%", *LOW, "--tokens", 24)
    assert again.code == 0
    assert "KL divergence" in again.out  # what cannot be kept is shown all the same
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(files.SWITCH, "on")
    last = cli(*asked).err.splitlines()[-1]
    assert f"over {judged['tokens']} tokens" in last
    assert f"KL divergence {judged['kl_mean']:.3g} nats" in last
    found = cli(*asked, "--json").json["quality"]
    assert found["perplexity"] == judged["perplexity"]
    assert found["exact_perplexity"] == judged["original_perplexity"]
    other = cli("run", folder, "hello", "--cache", "30%", "--skip-below", "0.1", *ANSWER)
    assert "their quality loss was not measured" in other.err
    exact = cli("run", folder, "hello", "--cache", "30%", *ANSWER)
    assert "quality" not in exact.err


def test_exact_experts_that_follow(cli: Run, folder: Path) -> None:
    ran = cli("run", folder, "hello", "--cache", "50%", *LOW, "--low-follow", "--verbose", *ANSWER)
    assert ran.code == 0, ran.err
    assert "in int4 (" in ran.err
    assert "exact later)" in ran.err
    assert " --low-follow" in ran.err.partition("same again:")[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--low-below", 0.3),
            "--low-below has an effect only with --miss-precision, which is off",
        ),
        (
            ("--low-share", "20%"),
            "--low-share has an effect only with --miss-precision, which is off",
        ),
        (("--low-follow",), "--low-follow has an effect only with --miss-precision, which is off"),
        (("--miss-precision", "int2"), "unknown miss_precision 'int2'"),
        (
            ("--skip-below", 1.5),
            "--skip-below must be a share of the gate weights, from 0 to 1, got 1.5",
        ),
        ((*LOW, "--skip-below", 0.95), "--skip-below 0.95 must be less than --low-below 0.9"),
        (("--skip-below", 0.3, "--substitute-below", 0.2), "must be less than --substitute-below"),
        ((*LOW, "--low-share", "2MB"), "--low-share must be a share such as 12.5%"),
        ((*LOW, "--split", "0.5"), "--miss-precision and --split exclude each other"),
        (("--miss-precision", "int4", "--low-below", 0), "--low-below 0 computes no miss"),
        (("--miss-precision", "int8"), "this pack has copies in int4: make a pack"),
    ],
)
def test_mistakes_of_a_run(cli: Run, folder: Path, options: tuple, said: str) -> None:
    assert said in cli("run", folder, "hello", "--cache", "30%", *options).mistake


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--miss-precision", "int4"), "--miss-precision has an effect only with --machine"),
        (("--miss-precision", "int2"), "unknown miss_precision 'int2'"),
        (("--nested",), "--nested is for --miss-precision int4"),
        (
            ("--low-share", "10%"),
            "--low-share has an effect only with --miss-precision, which is off",
        ),
        (("--low-follow",), "--low-follow has an effect only with --miss-precision, which is off"),
    ],
)
def test_mistakes_of_simulate(cli: Run, tmp_path: Path, options: tuple, said: str) -> None:
    made = cli(
        "trace", "synth", "topics", "-o", tmp_path / "t", "--tokens", 8, "--layers", 2,
        "--experts", 4, "--top-k", 2, "--requests", 2,
    )  # fmt: skip
    assert made.code == 0, made.err
    ran = cli("simulate", tmp_path / "t", "--policy", "lru", "--capacity", "4", *options)
    assert said in ran.mistake


def test_tune_keeps_what_is_lossless(cli: Run, folder: Path) -> None:
    ran = cli("tune", folder, "--cache", "30%", "--skip-below", 0.1)
    assert "`greenroom tune` compares settings with the same output" in ran.mistake


def test_a_server_cannot_promise_the_same_answer(cli: Run, folder: Path) -> None:
    ran = cli("serve", folder, "--cache", "30%", *LOW, "--batch-invariant")
    assert "--batch-invariant" in ran.mistake
