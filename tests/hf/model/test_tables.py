"""Embeddings that stay on disk: the same bits, less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from greenroom.config import LoadConfig
from greenroom.errors import CheckpointError, UnsupportedCall, UsageError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.load.describe import describe
from greenroom.hf.load.load import load
from greenroom.hf.load.report import startup_line
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.dense import _has_rows
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.table import disk_bytes, table_of
from tests.gguf_models import write
from tests.hf.check.test_parity import ids
from tests.hf.conftest import one_line
from tests.models import cached_tiny, tiny
from tests.quantised import fp8


def checkpoint(name: str, folder: Path) -> Path:
    if name == "fp8":
        return fp8(folder)
    if name in ("Q8_0", "Q4_K"):
        return write(folder / "tiny.gguf", "qwen3_moe", {"": name})
    return n_grams() if name == "qwen4_exp_text" else cached_tiny(name)


def n_grams() -> Path:
    return cached_tiny("qwen4_exp_text", ple_layer_ids=[1], ple_embed_dim=16)


@torch.inference_mode()
def logits(path: Path, kernels: str, least: int | None) -> tuple[torch.Tensor, int]:
    """Logits of a prompt and of a token after it, and the bytes of tables on disk."""
    skeleton = ModelSkeleton.of(path)
    if least is not None:
        skeleton.keep_tables_on_disk(least)
    if kernels == "rounded":
        skeleton.keep_dense_encoded()
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, capacity=9, kernels=kernels))
    try:
        first = model(ids(1, 7), use_cache=True)
        second = model(ids(1, 1), past_key_values=first.past_key_values, use_cache=True)
        return torch.cat([first.logits, second.logits], 1), disk_bytes(model)
    finally:
        model.greenroom.detach()


@pytest.mark.parametrize("kernels", ["rounded", "eager"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "qwen4_exp_text", "fp8", "Q8_0", "Q4_K"])
def test_the_bits_of_embeddings_in_memory(name: str, kernels: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    wanted, none = logits(path, kernels, None)
    found, on_disk = logits(path, kernels, 1)
    assert torch.equal(found, wanted)
    assert none == 0
    assert on_disk > 0


def test_an_embedding_that_is_tied_to_the_head_stays_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}, tie_word_embeddings=True)
    skeleton = ModelSkeleton.of(path)
    before = skeleton.dense_bytes
    skeleton.keep_tables_on_disk(1)
    assert skeleton.dense_bytes == before
    assert table_of(skeleton.load().get_input_embeddings()) is None


def test_n_grams_are_tables_too() -> None:
    """The code of qwen4_exp asks for the device of its n-grams' weight."""
    skeleton = ModelSkeleton.of(n_grams())
    skeleton.keep_tables_on_disk(1)
    tables = [name for name, module in skeleton.model.named_modules() if table_of(module)]
    assert any(name.endswith("ngram_embedding") for name in tables)


def test_the_threshold_and_the_memory_that_is_saved() -> None:
    path = cached_tiny("qwen3_moe")
    skeleton = ModelSkeleton.of(path)
    embedding = skeleton.model.get_input_embeddings().weight
    size, before = embedding.numel() * skeleton.dtype.itemsize, skeleton.dense_bytes
    skeleton.keep_tables_on_disk(size + 1)
    assert skeleton.dense_bytes == before
    skeleton.keep_tables_on_disk(size)
    assert skeleton.dense_bytes == before - size
    sizes = [describe(str(path), LoadConfig(disk_tables=value)) for value in ("off", size)]
    assert sizes[0].dense_bytes - sizes[1].dense_bytes == size
    assert sizes[0].read_bytes == sizes[1].read_bytes  # a token reads the other weights


def test_materialize_reads_the_tables(tmp_path: Path) -> None:
    path = tiny("qwen3_moe", tmp_path, tokenizer=True)
    whole = load_reference_model(ModelSkeleton.of(path))
    model, _ = load(str(path), cache="50%", disk_tables=1)
    line = startup_line("m", model, LoadConfig(disk_tables=1), verbose=True)
    assert "of embeddings stay on disk" in line
    assert "--disk-tables 1" in line
    assert model.num_parameters() == sum(each.numel() for each in whole.parameters())
    with pytest.raises(UnsupportedCall, match="state_dict would leave out weights"):
        model.state_dict()
    model.greenroom.materialize()
    for name, weight in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    skeleton = ModelSkeleton.of(path)
    skeleton.keep_tables_on_disk(1)
    (table,) = (table for module in skeleton.model.modules() if (table := table_of(module)))
    path.unlink()
    with pytest.raises(CheckpointError) as error:
        table.open()
    assert "cannot be read: No such file" in one_line(error)


def test_parts_that_are_arranged_when_they_are_read_have_no_rows() -> None:
    zeros = StoredTensor(0, "uint8", (256, 4), 0, 512, form="zeros4")
    codes = StoredTensor(
        0, "int32", (256, 128), 512, 1 << 14, "affine4", (256, 16), companions=(zeros,)
    )
    assert not _has_rows(codes)
    assert _has_rows(replace(codes, companions=(replace(zeros, form=""),)))


@pytest.mark.parametrize("value", ["50%", "none", "-1"])
def test_a_wrong_size_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--disk-tables"):
        LoadConfig(disk_tables=value)
