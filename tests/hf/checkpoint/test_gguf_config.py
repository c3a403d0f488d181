"""The config and tokenizer of a GGUF model: where they are found, and that they fit the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub import constants

from greenroom.errors import CheckpointError, GreenroomError, NotAModel, NotMoE, UnsupportedModel
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.resolve import find_checkpoint, open_checkpoint, resolve
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_architectures import FOLDER
from tests.gguf_models import write
from tests.hf.conftest import one_line
from tests.models import cached_tiny, save_tokenizer

METADATA = "config from the file's metadata"


def alone(folder: Path, name: str) -> Path:
    """A copy of a converted file without its config."""
    return Path(shutil.copy(FOLDER / name / "model.gguf", folder / "model.gguf"))


def test_origins_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    config = GgufCheckpoint.open(path).hf_config()
    assert GgufCheckpoint.open(path).config_origin == METADATA
    named, cached = tmp_path / "named", tmp_path / "hub" / "models--Qwen--Base"
    snapshot = cached / "snapshots" / "1"
    for folder, theta in ((named, 7.0), (snapshot, 5.0)):
        folder.mkdir(parents=True)
        config.rope_parameters["rope_theta"] = theta
        config.save_pretrained(folder)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def theta(checkpoint: Any) -> float:
        return float(checkpoint.hf_config().rope_parameters["rope_theta"])

    for name in (named, named / "config.json"):
        checkpoint = find_checkpoint(path, str(name))
        assert theta(checkpoint) == 7
        assert checkpoint.config_origin == f"config of {name}"
    config.rope_parameters["rope_theta"] = 3.0
    config.save_pretrained(tmp_path)
    assert resolve(tmp_path) == path  # config.json and one GGUF model are that model
    assert theta(open_checkpoint(path)) == 3
    assert open_checkpoint(path).config_origin == "config.json beside the file"
    assert theta(open_checkpoint(path, str(named))) == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "it has 2 layers, but the file has 3"),
        (
            {"num_experts": 4, "num_local_experts": 4},
            "its num_experts is 4, but expert_count of the file is 8",
        ),
        ({"hidden_size": 64}, "its hidden_size is 64, but embedding_length of the file is 256"),
        ({"vocab_size": 400}, "its vocabulary has 400 tokens, but that of the file has 320"),
        ({"model_type": "olmoe"}, "of the model type olmoe, but the file of the architecture"),
        ({"model_type": "none"}, "does not know the model type none"),
        ({"hidden_size": "x"}, "not a valid qwen3_moe config"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers in the config is"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    values = GgufCheckpoint.open(path).hf_config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert GgufCheckpoint.open(path).hf_config().num_experts == 8
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(GreenroomError) as error:
        GgufCheckpoint.open(path)
    assert words in one_line(error)
    assert str(tmp_path / "config.json") in one_line(error)


def test_what_config_may_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    wrong = (
        (tmp_path / "none.json", "there is no such file or folder"),
        (tmp_path, "has no config.json"),
        ("owner/none", "HF_HUB_OFFLINE forbids"),
        (path, "cannot be used"),
    )
    for named, words in wrong:
        with pytest.raises(NotAModel) as error:
            open_checkpoint(path, str(named))
        assert words in one_line(error)
    with pytest.raises(GreenroomError, match="--config is for GGUF files"):
        open_checkpoint(cached_tiny("qwen3_moe"), str(tmp_path))


def test_metadata_that_lack_a_config(tmp_path: Path) -> None:
    path = alone(tmp_path, "laguna")
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(path)
    assert "config.json beside the file, or name its folder or hub id with --config" in one_line(
        error
    )
    assert ModelSkeleton.of(open_checkpoint(path, str(FOLDER / "laguna"))).layers


def test_a_dense_model_of_an_architecture_that_has_experts_too(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(NotMoE) as error:
        open_checkpoint(path)
    assert "this is a dense model without experts" in one_line(error)


def test_a_base_model_that_does_not_fit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from greenroom.hf.checkpoint.gguf import origin
    from greenroom.hf.checkpoint.gguf.header import Header

    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    values = GgufCheckpoint.open(path).hf_config().to_dict()
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setattr(origin, "cached_snapshot", lambda model: base)
    read = origin.find_origin
    metadata = {origin.BASE: "https://huggingface.co/Qwen/Base"}
    monkeypatch.setattr(
        "greenroom.hf.checkpoint.gguf.checkpoint.find_origin",
        lambda header, named: read(
            Header(header.paths, {**header.metadata, **metadata}, header.tensors), named
        ),
    )
    (base / "config.json").write_text(json.dumps(values))
    text = "config of Qwen/Base, which the metadata name"
    assert GgufCheckpoint.open(path).config_origin == text
    (base / "config.json").write_text(json.dumps({**values, "vocab_size": 400}))
    assert GgufCheckpoint.open(path).config_origin == METADATA


def test_tokenizers(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    text = "The green room"
    expected = tokenizer_of(GgufCheckpoint.open(path))(text)["input_ids"]
    named = tmp_path / "named"
    named.mkdir()
    GgufCheckpoint.open(path).hf_config().save_pretrained(named)
    save_tokenizer(named)
    checkpoint = open_checkpoint(path, str(named))
    assert checkpoint.tokenizer_arguments["pretrained_model_name_or_path"] == named
    assert tokenizer_of(checkpoint)(text)["input_ids"] == expected
    (tmp_path / "other").mkdir()
    other = alone(tmp_path / "other", "deepseek_v3")
    with pytest.raises(UnsupportedModel) as error:
        tokenizer_of(open_checkpoint(other, str(FOLDER / "deepseek_v3")))
    assert "put the original model's tokenizer.json beside the file" in one_line(error)
    (named / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError):
        tokenizer_of(open_checkpoint(path, str(named)))
