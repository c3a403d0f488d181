"""`greenroom train-predictor`, and recordings with predictions, as their user sees them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.cli import main
from greenroom.core.predictor import Shape
from greenroom.predictors import PredictorSetup, predictor
from greenroom.trace import Trace, load, save
from tests.cli.conftest import Ran, Run
from tests.models import cached_tiny
from tests.predictors.replay import Routing, replay

FEW = ("--cache", "100%", "--max-new-tokens", 40, "--kernels", "eager", "--temperature", 1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [f"Act {n}: the performers {n * n} wait before they go on stage" for n in range(8)]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return path


@pytest.fixture(scope="module")
def recorded(folder: Path, prompts: Path) -> Path:
    """A recording that tests do not change."""
    out = prompts.parent / "t.trace"
    options = ("--gate-inputs", 1, "--token-ids", "--seed", 3)
    predict = ("--predict", "next-gate,next-gate:2,markov:2,token")
    command = ("trace", "record", folder, "--prompts", prompts, "-o", out, *FEW, *options, *predict)
    assert main([str(word) for word in command]) == 0
    return out


def refused(ran: Ran) -> str:
    """The last line of a command that had loaded the model, and said so, before it failed."""
    assert ran.code == 2
    assert "Traceback" not in ran.err
    line = ran.err.splitlines()[-1]
    assert line.startswith("greenroom: ")
    return line.removeprefix("greenroom: ")


def replayed(trace: Trace, name: str) -> np.ndarray:
    arrays = (trace.pass_starts, trace.pass_prefill, trace.request_starts, trace.token_ids)
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    made = predictor(name).build(PredictorSetup(shape))
    return replay(made, Routing(trace.experts, *arrays), shape).experts


def test_record_with_predictions_train_and_record_with_what_was_trained(
    cli: Run, folder: Path, prompts: Path, recorded: Path, tmp_path: Path
) -> None:
    trace = load(recorded)
    distances = {name: made.distance for name, made in trace.predictions.items()}
    assert distances == {"next-gate": 1, "next-gate:2": 2, "markov:2": 2, "token": 0}
    for name in ("markov:2", "token"):
        np.testing.assert_array_equal(trace.predictions[name].experts, replayed(trace, name))
    ahead = trace.predictions["next-gate"].experts
    assert (ahead[:, 1:] < 8).all()

    out = tmp_path / "p"
    command = ("train-predictor", folder, "--trace", recorded, "-o", out, "--epochs", 3)
    said = cli(*command, "--hidden", 16, "--held-out", 0.4, "--json").json
    assert (said["distance"], said["hidden"], said["epochs"]) == (1, 16, 3)
    assert said["accuracy"].keys() == {"learned", "next-gate", "popularity"}
    assert all(len(shares) == trace.layers for shares in said["accuracy"].values())
    assert all(shares[0] is None for shares in said["accuracy"].values())
    shown = cli(*command).out
    assert shown.startswith(f"{out}: distance 1 (layers ahead), hidden size 1024; trained on")
    assert shown.splitlines()[2].split() == ["layer", "learned", "next-gate", "popularity"]
    assert [line.split()[0] for line in shown.splitlines()[3:]] == ["1", "mean"]

    again = tmp_path / "again.trace"
    record = ("trace", "record", folder, "--prompts", prompts, "-o", again, *FEW, "--seed", 3)
    ran = cli(*record, "--predict", "learned", "--predictor", out)
    assert ran.code == 0, ran.err
    second = load(again)
    np.testing.assert_array_equal(second.experts, trace.experts)
    made = second.predictions["learned"]
    assert made.distance == 1
    assert (made.experts[:, 1:] < 8).all()
    decodes = np.flatnonzero(~np.isin(np.arange(trace.tokens), trace.request_starts))
    firsts = [t for t in decodes.tolist() if t in set(trace.pass_starts.tolist())]
    assert (made.experts[:, 0] == 255).all()  # the first layer is not predicted
    assert (made.experts[firsts, 1] < 8).all()
    assert sorted(os.listdir(tmp_path)) == ["again.trace", "p"]


def test_next_gate_predicts_a_layer_in_place_of_a_worse_network(
    cli: Run, folder: Path, prompts: Path, recorded: Path, tmp_path: Path
) -> None:
    """A network of one unit is worse than layer 1's router."""
    out, again = tmp_path / "p", tmp_path / "again.trace"
    train = ("train-predictor", folder, "--trace", recorded, "-o", out, "--held-out", 0.4)
    assert "layers that next-gate predicts" not in cli(*train, "--epochs", 1).out
    shown = cli(*train, "--epochs", 1, "--hidden", 1, "--next-gate").out
    assert shown.splitlines()[-1] == "layers that next-gate predicts: 1"
    record = ("trace", "record", folder, "--prompts", prompts, "-o", again, *FEW, "--seed", 3)
    assert cli(*record, "--predict", "learned,next-gate", "--predictor", out).code == 0
    made = load(again).predictions
    ahead = made["next-gate"].experts
    assert (made["learned"].experts[:, 0] == 255).all()
    np.testing.assert_array_equal(made["learned"].experts[:, 1], ahead[:, 1])
    run = ("run", folder, "Act 1", "--cache", "50%", "--max-new-tokens", 2, "--kernels", "eager")
    ran = cli(*run, "--prefetch", "learned", "--predictor", out, "--json")
    assert ran.json["prefetch"]["predictor"] == "learned", ran.err

    trace = load(recorded)
    trace.predictions.clear()
    save(trace, tmp_path / "none")
    command = ("train-predictor", folder, "--trace", tmp_path / "none", "-o", out, "--next-gate")
    assert "record it with --predict next-gate:1" in refused(cli(*command))


def test_a_predictor_of_another_model_is_refused(
    cli: Run, folder: Path, prompts: Path, recorded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p"
    train = ("train-predictor", folder, "--trace", recorded, "-o", out, "--epochs", 1)
    assert cli(*train, "--held-out", 0.4).code == 0
    other = cached_tiny("olmoe", tokenizer=True)
    record = ("trace", "record", other, "--prompts", prompts, "-o", tmp_path / "o", *FEW)
    learned = (*record, "--predict", "learned")
    mistake = refused(cli(*learned, "--predictor", out))
    assert mistake.startswith(f"{out}: the predictor was trained for another model")
    assert "needs a file of" in refused(cli(*learned))
    assert "cannot be read" in refused(cli(*learned, "--predictor", tmp_path / "none"))
    out.write_bytes(out.read_bytes()[:99])
    assert "ends inside its header" in refused(cli(*learned, "--predictor", out))
    assert "ends inside its header" in refused(
        cli(*record, "--predictor", out)
    )  # auto would prefetch by it
    other_one = (*record, "--prefetch", "markov", "--predictor", out)
    assert "give --prefetch learned" in refused(cli(*other_one))
    assert "unknown predictor 'nonsense'" in cli(*record, "--predict", "nonsense").mistake
    assert not (tmp_path / "o").exists()
    assert not (tmp_path / "o.journal").exists()


def test_a_model_whose_routers_cannot_be_asked_is_refused_in_one_line(
    cli: Run, prompts: Path, tmp_path: Path
) -> None:
    model = cached_tiny("zaya", tokenizer=True)
    record = ("trace", "record", model, "--prompts", prompts, "-o", tmp_path / "o", *FEW)
    mistake = refused(cli(*record, "--predict", "next-gate"))
    assert "ZayaRouter also routes by router_states" in mistake


def test_a_trace_of_another_model_cannot_teach(
    cli: Run, folder: Path, recorded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p"
    command = ("train-predictor", cached_tiny("olmoe"), "--trace", recorded, "-o", out)
    assert "is of another model" in cli(*command).mistake
    trace = load(recorded)
    del trace.meta["fingerprint"]
    save(trace, tmp_path / "old")
    command = ("train-predictor", folder, "--trace", tmp_path / "old", "-o", out)
    assert "does not name its model" in cli(*command).mistake
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--distance", 0), "--distance must be at least 1"),
        (("--distance", 9), "the model has 2 MoE layers only"),
        (("--held-out", 1), "--held-out must be above 0 and below 1"),
        (("--epochs", 0), "--epochs must be at least 1"),
        (("--tokens", 49), "--tokens must be at least 50"),
        (("-o", "/"), "folder"),
        (("-o", "/no/such/p"), "folder"),
    ],
)
def test_bad_options(
    cli: Run, folder: Path, recorded: Path, tmp_path: Path, options, words
) -> None:
    command = ("train-predictor", folder, "--trace", recorded, "-o", tmp_path / "p")
    assert words in cli(*command, *options).mistake
    assert not (tmp_path / "p").exists()
