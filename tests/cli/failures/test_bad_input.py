"""Every mistake and every damage: one clear line, exit code 2, no thread left."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from greenroom.plan.history.files import save_predictor
from greenroom.runtime.memory.system import rss_bytes
from tests.cli.conftest import Run
from tests.cli.test_simulate import machine as machine  # a fixture
from tests.models import cached_tiny, make, save_tokenizer

FEW = ("--max-new-tokens", 4, "--kernels", "eager")
INDEX = "model.safetensors.index.json"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def rewrite(folder: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor whose name has `part` in it."""
    for path in shards(folder):
        tensors = load_file(path)
        if name := next((n for n in sorted(tensors) if part in n), None):
            tensors[name] = change(tensors[name]).contiguous()
            with safe_open(path, "pt") as file:
                save_file(tensors, path, file.metadata())
            return
    raise AssertionError(part)


def missing_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def truncated_shard(folder: Path) -> None:
    os.truncate(shards(folder)[1], shards(folder)[1].stat().st_size - 100)


def index_names_no_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["extra"] = "model-00009-of-00009.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def expert_of_wrong_shape(folder: Path) -> None:
    rewrite(folder, "experts.0.", lambda tensor: tensor[:-1])


def dense_of_wrong_shape(folder: Path) -> None:
    rewrite(folder, "q_proj", lambda tensor: tensor[:-1])


def expert_of_wrong_type(folder: Path) -> None:
    rewrite(folder, "experts.0.", lambda tensor: tensor.to(torch.int32))


def corrupt_header(folder: Path) -> None:
    with open(shards(folder)[0], "r+b") as file:
        file.seek(8)
        file.write(b"nonsense")


def no_model(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def dense_model(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()
    make("llama").save_pretrained(folder)
    save_tokenizer(folder)


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            missing_shard,
            r"model-00002-of-0000\d.safetensors: this file is missing, though .*names it",
        ),
        (truncated_shard, r"model-00002-of-0000\d.safetensors: truncated"),
        (index_names_no_file, "model-00009-of-00009.safetensors: this file is missing"),
        (expert_of_wrong_shape, r"experts\.0\..*shape"),
        (dense_of_wrong_shape, r"q_proj.*has shape .* but the config says"),
        (expert_of_wrong_type, r"int32"),
        (corrupt_header, "header is not JSON"),
        (no_model, "the folder has no config.json, so it holds no model"),
        (pickles, "are in pickle files .pytorch_model.bin."),
        (dense_model, "experts"),
        (no_tokenizer, "the model's tokenizer cannot be loaded"),
    ],
)
def test_a_damaged_or_unfit_checkpoint(
    cli: Run, copy: Path, command: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(copy)
    before = sorted(copy.iterdir())
    ran = cli(command, copy, *(("Hi", *FEW) if command == "run" else ()), "--cache", "25%")
    assert ran.out == ""
    assert re.search(words, ran.mistake)
    assert str(copy) in ran.mistake or damage is dense_model
    assert sorted(copy.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "1GiB", "--cache", "25%"), "--memory and --cache exclude each other"),
        (("--memory", "lots"), "write bytes as 8GiB or 500MB, a share as 60%"),
        (("--memory", "0"), "--memory must be more than 0"),
        (("--memory", "8"), "--memory is 8, which are bytes: give a unit, as in 8GiB"),
        (("--cache", "101%"), "a share is at most 100%"),
        (("--cache", "10B"), r"has no room for an expert: give at least \d+ bytes"),
        (("--policy", "mru"), "unknown policy 'mru': choose one of auto, .*fifo.*lfu"),
        (("--kernels", "numba"), "kernels 'numba' are now called 'native'"),
        (("--kernels", "fast"), "unknown kernels? 'fast': choose one of auto, eager, native"),
        (("--device", "tpu"), "unknown device 'tpu': choose one of auto, cpu"),
        (("--scope", "all"), "unknown scope 'all': choose one of shared, per-layer"),
        (("--dtype", "int3"), "unknown dtype 'int3': choose one of auto, bfloat16"),
        (("--context", "0"), "--context must be at least 1, got 0"),
        (("--context", "many"), "--context: invalid int value: 'many'"),
        (("--readers", "0"), "--readers must be at least 1"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--temperature", "-1"), "--temperature must be from 0 to 100"),
        (("--top-p", "2"), "--top-p must be above 0 and at most 1"),
        (("--top-k", "0"), "--top-k must be at least 1"),
        (("--colour", "red"), r"unrecognized arguments: --colour red \(see greenroom run --help\)"),
        (("--mem", "1GiB"), "unrecognized arguments: --mem"),
        (("--json", "--live"), "--live: not allowed with argument --json"),
        (("--prefetch", "tomorrow"), "unknown predictor 'tomorrow': choose one of auto, .*markov"),
        (("--prefetch", "token:2"), "predictor token has no distance to choose: leave out '2'"),
        (
            ("--prefetch", "markov:0"),
            "the distance of predictor markov is '0': it must be a number of layers",
        ),
        (
            ("--prefetch", "markov:9"),
            "the model has 2 MoE layers, so a predictor cannot predict 9 layers ahead",
        ),
        (("--prefetch", "oracle"), "predictor oracle needs a recorded trace"),
        (("--prefetch", "learned"), "--prefetch learned needs --predictor FILE"),
        (
            ("--predictor", "no.safetensors"),
            "no.safetensors: the predictor's file cannot be read: No such file",
        ),
        (("--prefetch", "off", "--predictor", "x"), "--predictor is for prefetching, .* off"),
        (("--prefetch", "token", "--predictor", "x"), "--predictor FILE is for --prefetch learned"),
        (("--read-limit", "fast"), "--read-limit is 'fast': write bytes as"),
        (("--read-limit", "10%"), "--read-limit must be bytes a second, as 50MB"),
        (("--timeline", "/nowhere/out.json"), "there is no folder /nowhere"),
        (("--timeline", "/"), "cannot write /: it is a folder"),
        (("--timeline", "/dev/null"), "cannot write /dev/null: it is not an ordinary file"),
    ],
)
def test_an_option_that_cannot_be_right(
    cli: Run, folder: Path, options: tuple[str, ...], words: str
) -> None:
    ran = cli("run", folder, "Hi", *options)
    assert ran.out == ""
    assert re.search(words, ran.mistake)


def test_a_predictor_of_another_model_is_refused_before_the_model_is_loaded(
    cli: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "greenroom.hf.model.skeleton.ModelSkeleton.load", None
    )  # what calls it fails otherwise
    path = tmp_path / "p"
    tensors = {"distance": np.ones(1, np.int64)}
    save_predictor(path, tensors, "another", {"model": "olmoe"})
    for options in (("--predictor", path), ("--prefetch", "learned", "--predictor", path)):
        line = cli("run", folder, "Hi", "--cache", "50%", *options).mistake
        assert line.startswith(f"{path}: the predictor was trained for another model (olmoe)")
    path.write_bytes(b"nonsense")
    assert str(path) in cli("run", folder, "Hi", "--cache", "50%", "--predictor", path).mistake


@pytest.mark.parametrize("prefetch", ["next-gate", "next-gate:2"])
def test_routers_that_cannot_be_asked_are_said_before_the_model_is_loaded(
    cli: Run, prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached_tiny("zaya", tokenizer=True)
    ran = cli("run", model, "Hi", "--cache", "50%", *FEW, "--verbose")
    assert ran.code == 0
    assert "--prefetch markov" in ran.err  # what auto is there
    monkeypatch.setattr("greenroom.hf.model.skeleton.ModelSkeleton.load", None)
    line = cli("run", model, "Hi", "--cache", "50%", "--prefetch", prefetch).mistake
    assert "ZayaRouter also routes by router_states" in line


def test_a_config_that_would_end_its_parser(cli: Run, copy: Path, machine: Path) -> None:
    (copy / "config.json").write_text("[" * 200_000)
    said = "cannot be used: it is not JSON: its brackets are not in pairs"
    plan = ("plan", copy, "--memory", "1GiB", "--machine", machine)
    for command in (("run", copy, "Hi"), plan, ("verify", copy)):
        assert cli(*command).mistake == f"{copy / 'config.json'} {said}"


def test_a_config_of_a_billion_layers(cli: Run, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    line = cli("run", copy, "Hi", "--cache", "50%").mistake
    assert "num_hidden_layers in the config is 1000000000, but the checkpoint has" in line


def test_numbers_that_no_float_holds(cli: Run, folder: Path, tmp_path: Path) -> None:
    for name, text in (("infinite", "1e999"), ("long", "9" * 400)):
        path = tmp_path / f"{name}.json"
        path.write_text(f'{{"format": "greenroom-pins", "version": 1, "tasks": {text}}}')
        line = cli("run", folder, "Hi", "--cache", "50%", "--pin", path).mistake
        assert line.startswith(f"{path} is no file of pinned experts: it is not usable: ")


def test_a_budget_that_is_too_small_says_how_much_would_do(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = rss_bytes()  # this process grows with every test: a command's own is another each time
    for module in ("memory.budget", "load.describe", "load.attach"):
        monkeypatch.setattr(f"greenroom.hf.{module}.rss_bytes", lambda: taken)
    line = cli("run", folder, "Hi", *FEW, "--memory", "20MiB").mistake
    assert "more than the budget of 20 MiB: " in line
    enough = re.search(r"; give --memory (\d+MiB)", line)
    assert enough
    taken += 3 << 20  # a process is not of the same size at every start
    assert cli("run", folder, "Hi", *FEW, "--memory", enough[1]).code == 0


def test_a_prompt_that_does_not_fit(cli: Run, folder: Path) -> None:
    assert "the prompt is empty" in cli("run", folder, "", "--cache", "25%").mistake
    line = cli("run", folder, "word " * 40, "--cache", "25%", "--context", 8).err.splitlines()[-1]
    assert re.search(r"\d+ tokens, which leaves no room for an answer in --context 8", line)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "nobody/nothing",
            "nobody/nothing: .* not .* in the local cache, and HF_HUB_OFFLINE forbids",
        ),
        ("./nothing", "./nothing: there is no such folder"),
        ("a b", "a b: this name is neither a folder nor a hub id"),
    ],
)
def test_a_model_that_cannot_be_had(cli: Run, model: str, words: str) -> None:
    assert re.search(words, cli("run", model, "Hi").mistake)
    assert re.search(words, cli("verify", model).mistake)


def test_a_file_is_not_a_folder(cli: Run, folder: Path) -> None:
    assert "is a file" in cli("run", folder / "config.json", "Hi").mistake


@pytest.mark.parametrize("kind", ["--max-new-tokens", "--cache", "--dtype", "--prompt", "--x"])
def test_options_of_verify(cli: Run, folder: Path, kind: str) -> None:
    wrong = {"--max-new-tokens": "0", "--cache": "0%", "--dtype": "int3", "--prompt": ""}
    ran = cli("verify", folder, kind, wrong.get(kind, "1"))
    assert ran.out == ""
    assert ran.mistake


def test_no_model_and_no_such_command(cli: Run) -> None:
    assert "required: MODEL" in cli("run").mistake
    assert "invalid choice: 'dance'" in cli("dance").mistake


def test_without_a_command_it_prints_its_help(cli: Run) -> None:
    ran = cli()
    assert (ran.code, ran.err) == (0, "")
    assert "run " in ran.out
    assert "verify " in ran.out


@pytest.mark.parametrize("command", ["run", "verify"])
def test_help_says_what_the_defaults_are(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from greenroom.cli import main

    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "%%" not in text
    assert "(default: auto)" in text
    assert "a model: a Hugging Face folder" in text


def test_a_read_error_in_the_middle_of_an_answer(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, calls = os.preadv, []

    def failing(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) > 150:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    ran = cli("run", folder, "Hi", "--cache", "13%", "--max-new-tokens", 90, "--kernels", "eager")
    started, error = ran.err.splitlines()
    assert ran.code == 2
    assert ran.out.endswith("\n")
    assert "experts in slots" in started
    assert re.fullmatch(
        r"greenroom: cannot read an expert from .*safetensors, at byte \d+: Input/output error",
        error,
    )
    monkeypatch.undo()
    assert cli("run", folder, "Hi", "--cache", "13%", *FEW).code == 0
