"""`greenroom train-policy`, and the runs that start with what it has trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.cli import main, train_policy
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.plan.history import files
from greenroom.plan.history.files import load_routing
from greenroom.runtime.recording import policy_training
from greenroom.trace import load, save
from tests.cli.conftest import Run
from tests.models import cached_tiny

NETWORK = "0/network.vectors"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(files.SWITCH, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of 16 requests, which tests do not change."""
    where = tmp_path_factory.mktemp("policy")
    prompts = where / "prompts.txt"
    prompts.write_text("\n".join(f"Act {n} of {n * n}" for n in range(16)))
    command = ("trace", "record", folder, "--prompts", prompts, "-o", where / "t",
               "--cache", "100%", "--max-new-tokens", 40, "--temperature", 1, "--kernels",
               "eager")  # fmt: skip
    assert main([str(word) for word in command]) == 0
    return where / "t"


def stored(folder: Path) -> Any:
    history = load_routing(fingerprint(find_checkpoint(str(folder))))
    return None if history is None else history.states.get("policy next-use")


def with_misses(monkeypatch: pytest.MonkeyPatch, misses: int) -> None:
    """Let the test of the training count 100 misses before and a given number after."""
    rows = [{"percent": 25, "untrained": 100, "misses": misses}]
    monkeypatch.setattr(train_policy, "_misses", lambda *_: rows)


def test_later_runs_start_with_the_network_and_keep_it(
    cli: Run, folder: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_misses(monkeypatch, 90)
    run = ("run", folder, "Act 1", "--cache", "50%", "--max-new-tokens", 30, "--kernels", "eager",
           "--policy", "next-use", "--json")  # fmt: skip
    before = cli(*run)
    assert before.code == 0, before.err
    hot = load_routing(fingerprint(find_checkpoint(str(folder))))
    assert hot is not None
    assert NETWORK not in stored(folder)
    shown = cli("train-policy", folder, "--trace", recorded, "--epochs", 1)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0].startswith("trained on ")
    assert lines[0].endswith(" passes of other requests")
    assert lines[2].split() == ["25", "100", "90", "(-10.0%)"]
    assert lines[3].startswith("later runs with --policy next-use (or auto) start with it: ")
    history = load_routing(fingerprint(find_checkpoint(str(folder))))
    assert history is not None
    np.testing.assert_array_equal(history.hot, hot.hot)  # of the run before
    network = stored(folder)[NETWORK]
    assert network.any()
    after = cli(*run)
    assert after.code == 0
    assert "cannot use what it learned" not in after.err
    assert after.json["text"] == before.json["text"]
    np.testing.assert_array_equal(stored(folder)[NETWORK], network)
    steps = history.states["policy next-use"]["0/layer_steps"]
    assert (stored(folder)["0/layer_steps"] > steps).all()  # and learns on


def test_a_network_without_gain_is_not_stored(
    cli: Run, folder: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_misses(monkeypatch, 100)
    command = ("train-policy", folder, "--trace", recorded, "--epochs", 1)
    assert cli(*command).out.splitlines()[-1].startswith("no gain: nothing was stored")
    said = cli(*command, "--json", "--held-out", 0.25).json
    assert said["stored"] is None
    assert said["passes"] + said["held_out"] == load(recorded).passes
    assert said["test"] == [{"percent": 25, "untrained": 100, "misses": 100}]
    assert stored(folder) is None


def test_misses_of_requests_that_were_held_out(folder: Path, recorded: Path) -> None:
    from greenroom.config import TrainPolicyConfig
    from greenroom.trace import stream

    trace, config = load(recorded), TrainPolicyConfig(epochs=1)
    training, test = train_policy._split(trace, config)
    assert (training.requests, test.requests) == (14, 2)
    learned = policy_training.train_policy(stream(training, "runtime"), trace.offsets, config)
    rows = train_policy._misses(test, learned)
    assert [row["percent"] for row in rows] == [25, 50]
    assert all(0 < row["misses"] < 1000 and row["untrained"] > 0 for row in rows)
    assert rows[1]["misses"] < rows[0]["misses"]


def test_traces_that_cannot_teach_are_refused(
    cli: Run, folder: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ("train-policy", cached_tiny("olmoe"), "--trace", recorded)
    assert "is of another model" in cli(*other).mistake
    trace = load(recorded)
    save(trace.select([0]), tmp_path / "one")
    command = ("train-policy", folder, "--trace", tmp_path / "one")
    assert "the trace has one request" in cli(*command).err
    save(trace.select([0, 1, 2]), tmp_path / "three")
    command = ("train-policy", folder, "--trace", tmp_path / "three")
    assert "passes to train on: at least 256 are needed" in cli(*command).err
    monkeypatch.setenv(files.SWITCH, "off")
    command = ("train-policy", folder, "--trace", recorded)
    assert "GREENROOM_LEARNED is off" in cli(*command).err
    assert stored(folder) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--held-out", 0), "--held-out must be above 0 and below 1"),
        (("--epochs", 0), "--epochs must be at least 1"),
        (("--seed", -1), "--seed must be at least 0"),
    ],
)
def test_bad_options(cli: Run, folder: Path, recorded: Path, options, words) -> None:
    assert words in cli("train-policy", folder, "--trace", recorded, *options).mistake
