"""Finding a model and its files, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from greenroom.errors import CheckpointError, ModelError, NotAModel, UnsupportedModel
from greenroom.hf.checkpoint import checkpoint as module
from greenroom.hf.checkpoint.checkpoint import INDEX, SINGLE
from greenroom.hf.checkpoint.resolve import open_checkpoint, resolve
from tests.hf.conftest import one_line, write_safetensors
from tests.models import cached_tiny


def make_folder(tmp_path: Path) -> Path:
    """Two shards, four tensors."""
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    tensors = {name: torch.randn(4, 3) for name in "abcd"}
    write_safetensors(tmp_path / "model-1.safetensors", {k: tensors[k] for k in "ba"})
    write_safetensors(tmp_path / "model-2.safetensors", {k: tensors[k] for k in "cd"})
    weights = {k: f"model-{1 + (k > 'b')}.safetensors" for k in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    return tmp_path


def change_index(folder: Path, **changes: str) -> None:
    weights = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weights, **changes}}))


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_safetensors_reads(shards: int) -> None:
    folder = cached_tiny("mixtral", shards=shards)
    checkpoint = open_checkpoint(folder)
    wanted = {}
    for path in sorted(folder.glob("*.safetensors")):
        wanted.update(load_file(path))
    assert (len(checkpoint.files) == 1) == (shards == 1)
    assert set(checkpoint.tensors) == set(wanted)
    assert all(torch.equal(checkpoint.read(name), wanted[name]) for name in wanted)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "other.safetensors").write_bytes(b"junk")
    assert set(open_checkpoint(folder).tensors) == set("abcd")


def test_a_tensor_in_two_files_is_the_indexed_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    c = open_checkpoint(folder).read("c")
    write_safetensors(folder / "model-1.safetensors", {n: torch.zeros(4, 3) for n in "abc"})
    write_safetensors(folder / "model-3.safetensors", {n: torch.ones(4, 3) for n in "ec"})
    change_index(folder, e="model-3.safetensors")
    assert torch.equal(open_checkpoint(folder).read("c"), c)


def missing_shard(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()


def index_names_no_file(folder: Path) -> None:
    change_index(folder, e="model-9.safetensors")


def index_names_no_tensor(folder: Path) -> None:
    change_index(folder, e="model-1.safetensors")


def truncated_shard(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def index_without_map(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def index_with_numbers(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def index_leads_outside(folder: Path) -> None:
    change_index(folder, e="../model-1.safetensors")


def lost_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def no_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def pickles(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def gguf_beside_config(folder: Path) -> None:
    no_weights(folder)
    (folder / "model.gguf").write_bytes(b"GGUF")


def index_of_pickles(folder: Path) -> None:
    change_index(folder, e="pytorch_model.bin")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def config_of_something_else(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": 1}')


WRONG: list[tuple[Any, type[ModelError], str]] = [
    (missing_shard, CheckpointError, "model-2.safetensors: this file is missing"),
    (index_names_no_file, CheckpointError, "model-9.safetensors: this file is missing"),
    (index_names_no_tensor, CheckpointError, "model-1.safetensors: the tensor e is missing"),
    (truncated_shard, CheckpointError, "model-1.safetensors: truncated: the tensor a ends"),
    (broken_index, CheckpointError, f"{INDEX} cannot be used"),
    (index_without_map, CheckpointError, f"{INDEX} cannot be used"),
    (index_with_numbers, CheckpointError, f"{INDEX}: damaged"),
    (empty_index, CheckpointError, f"{INDEX}: damaged"),
    (index_leads_outside, CheckpointError, "outside the model's folder"),
    (lost_index, CheckpointError, f"{INDEX}: this file is missing"),
    (no_weights, NotAModel, SINGLE),
    (pickles, UnsupportedModel, "pytorch_model.bin), but Greenroom reads only safetensors"),
    (gguf_beside_config, NotAModel, "give the path of a GGUF file"),
    (index_of_pickles, UnsupportedModel, "Greenroom reads only .safetensors"),
    (no_config, NotAModel, "no config.json"),
    (broken_config, NotAModel, "config.json cannot be used"),
    (config_of_something_else, NotAModel, "has no model_type"),
]


@pytest.mark.parametrize(
    ("spoil", "kind", "message"), WRONG, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_wrong_folder_is_named(
    tmp_path: Path, spoil: Any, kind: type[ModelError], message: str
) -> None:
    folder = make_folder(tmp_path)
    spoil(folder)
    with pytest.raises(kind) as error:
        open_checkpoint(folder)
    assert message in one_line(error)
    assert str(folder) in one_line(error)


def test_truncated_after_opening(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    checkpoint = open_checkpoint(folder)
    truncated_shard(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.read("a")
    assert "model-1.safetensors: truncated" in one_line(error)
    missing_shard(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.read("c")
    assert "No such file" in one_line(error)


def test_resolve_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve(folder.name).samefile(folder)


@pytest.mark.parametrize("name", ["./none", "../none", "~/none", "/none", "a/b/c", "none/"])
def test_what_looks_like_a_path_is_not_looked_up(name: str) -> None:
    with pytest.raises(NotAModel) as error:
        resolve(name)
    assert "no such folder" in one_line(error)


def test_resolve_refuses_files_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(NotAModel, match="is a file"):
        resolve(str(tmp_path / "x.txt"))
    with pytest.raises(NotAModel, match="there is no such file"):
        resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(NotAModel, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_the_demo_is_found_in_a_wheel_and_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import greenroom

    package = tmp_path / "src" / "greenroom"
    for home in (tmp_path / "models" / "demo", package / "models" / "demo"):
        home.mkdir(parents=True)
    monkeypatch.setattr(greenroom, "__file__", str(package / "__init__.py"))
    with pytest.raises(NotAModel, match="demo"):
        resolve("demo")
    (tmp_path / "models" / "demo" / "config.json").write_text('{"model_type": "mixtral"}')
    assert resolve("demo") == tmp_path / "models" / "demo"
    shutil.copy(tmp_path / "models" / "demo" / "config.json", package / "models" / "demo")
    assert resolve("demo") == package / "models" / "demo"


def test_only_headers_are_read_on_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    monkeypatch.setattr(module.Checkpoint, "read", None)
    assert set(open_checkpoint(folder).tensors) == set("abcd")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nope",
            "nor a hub id such as owner/name or owner/name:Q4_K_M; did you mean demo",
        ),
        (
            "dem",
            "dem: this name is neither a folder nor a hub id such as owner/name or",
        ),
        ("minne", "did you mean mine?"),
        ("/nowhere/x", "/nowhere/x: there is no such folder"),
        ("x.gguf", "x.gguf: there is no such file"),
    ],
)
def test_what_can_be_no_hub_id_is_said_at_once(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("greenroom.hf.checkpoint.resolve.download", None)
    with pytest.raises(NotAModel) as error:
        resolve(name)
    assert words in one_line(error)
