"""`--config` names the config of a GGUF file for every command that opens a model."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.cli import parser
from greenroom.config import ZipfConfig
from greenroom.trace import save
from greenroom.trace.synth import zipf
from tests.cli.conftest import Run
from tests.gguf_architectures import FOLDER
from tests.server.batch.conftest import line_of, write

# Commands with a MODEL that they do not open: downloads, names and removal.
CLOSED = {("pull",), ("list",), ("rm",)}
# What else a command asks for; {} is a folder.
NEEDED: dict[tuple[str, ...], list[str]] = {
    ("run",): ["hello"],
    ("serve",): ["--port", "0"],
    ("batch",): ["{}/requests.jsonl", "--out", "{}/answers.jsonl"],
    ("plan",): ["--memory", "8GiB"],
    ("pack",): ["--out", "{}/pack", "--experts", "int8"],
    ("trace", "record"): ["--out", "{}/trace", "--prompts", "{}/prompts.txt"],
    ("train-predictor",): ["--out", "{}/predictor", "--trace", "{}/zipf.trace"],
    ("train-policy",): ["--trace", "{}/zipf.trace"],
}
QUALITY = ["--quality", "{}/prompts.txt", "--against", "{}/model.gguf", "--kv", "int4"]


def commands(
    of: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command of the command line, with its words."""
    groups = [each for each in of._actions if isinstance(each, argparse._SubParsersAction)]
    for group in groups:
        for name, command in group.choices.items():
            yield from commands(command, (*path, name))
    if not groups:
        yield path, of


def opening() -> list[tuple[str, ...]]:
    """The commands that open a MODEL."""
    return [
        path
        for path, command in commands(parser())
        if path not in CLOSED and any(each.dest == "model" for each in command._actions)
    ]


def test_every_command_that_opens_a_model_has_the_option() -> None:
    table = dict(commands(parser()))
    assert len(opening()) >= 11
    for path in opening():
        assert "--config" in table[path]._option_string_actions, path
    assert {*NEEDED} <= {*opening()}


@pytest.mark.parametrize(
    ("path", "more"),
    [*((path, NEEDED.get(path, [])) for path in opening()), (("verify",), QUALITY)],
    ids=lambda each: " ".join(each),
)
def test_the_option_reaches_the_model(
    cli: Run, tmp_path: Path, path: tuple[str, ...], more: list[str]
) -> None:
    """The file has no config of its own, so a command that dropped the option would say so."""
    shutil.copy(FOLDER / "deepseek_v3" / "model.gguf", tmp_path / "model.gguf")
    (tmp_path / "prompts.txt").write_text("hello\n")
    line = line_of("a")
    line["body"]["model"] = "model"
    write(tmp_path / "requests.jsonl", [line])
    save(zipf(ZipfConfig(layers=2, experts=4, top_k=2, tokens=9)), tmp_path / "zipf.trace")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"model_type": "olmoe"}')
    arguments = [each.format(tmp_path) for each in more]
    ran = cli(*path, tmp_path / "model.gguf", *arguments, "--config", wrong)
    assert ran.code == 2
    assert "model type olmoe, but the file of the architecture deepseek2" in ran.err
    assert "wrong.json" in ran.err
