"""Dense matrices stay as the checkpoint stores them, and no bit tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.errors import CheckpointError, ClosedError
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.load.load import load
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.dense import _used_by_code
from greenroom.hf.model.encoded import encoded_matrix
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import StoredMatrix, stored_matrix
from tests.gguf_models import write
from tests.hf.check.test_parity import ids
from tests.hf.conftest import one_line
from tests.models import cached_tiny
from tests.quantised import compressed, fp8
from tests.quantised_floats import floats


def gguf(name: str, types: dict[str, str], **overrides: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder / "tiny.gguf", name, types, **overrides)


CASES: dict[str, Callable[[Path], Path]] = {
    "Q8_0": gguf("qwen3_moe", {"": "Q8_0"}),
    "Q5_0": gguf("qwen3_moe", {"": "Q5_0"}),
    "several types": gguf("qwen3_moe", {"attn_v": "Q6_K", "attn_q": "BF16", "": "Q4_K"}),
    "shared experts": gguf("qwen2_moe", {"": "Q4_0"}),
    "tied": gguf("qwen3_moe", {"": "Q8_0"}, tie_word_embeddings=True),
    "fp8": fp8,
    "fp8, another attention": lambda folder: fp8(folder, name="deepseek_v3"),
    "int4": compressed,
    "nvfp4": lambda folder: floats(folder, "modelopt", "nvfp4"),
    "fp8, powers of two": lambda folder: floats(folder, "mxfp8", "mxfp8"),
    "fp8, a scale for a row": lambda folder: floats(folder, "modelopt", "fp8 rows"),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[request.param](tmp_path_factory.mktemp("stored"))


@contextmanager
def served(path: Path, stored: bool, **parts: Any) -> Iterator[PreTrainedModel]:
    skeleton = ModelSkeleton.of(path)
    if stored:
        skeleton.keep_dense_encoded()
    model = skeleton.load()
    model.greenroom = Greenroom(model, ModelSetup(skeleton.catalog, capacity=9, **parts))
    try:
        yield model
    finally:
        model.greenroom.detach()


@torch.inference_mode()
def logits(model: PreTrainedModel) -> Tensor:
    """Of a prompt of 7 tokens and 4 after it."""
    found = [model(ids(1, 7), use_cache=True)]
    for n in range(4):
        cache = found[-1].past_key_values
        found.append(model(ids(1, 1) + n, past_key_values=cache, use_cache=True))
    return torch.cat([out.logits for out in found], 1)


def test_the_bits_of_expanded_ones_and_less_memory(checkpoint: Path) -> None:
    with served(checkpoint, False, kernels="rounded") as model:
        wanted, counts = logits(model), model.greenroom.bindings.accelerated.counts
    with served(checkpoint, True, kernels="rounded") as model:
        kept = [name for name, module in model.named_modules() if stored_matrix(module) is not None]
        assert torch.equal(logits(model), wanted)
        mine = model.greenroom.bindings.accelerated.counts
        assert {key: mine.get(key) for key in counts} == counts
        assert len(kept) >= 3
        assert not any("gate" in name.split(".") for name in kept)
    full, skeleton = ModelSkeleton.of(checkpoint).dense_bytes, ModelSkeleton.of(checkpoint)
    tensors = sorted(skeleton.dense_tensors)
    skeleton.keep_dense_encoded()
    assert sorted(skeleton.dense_tensors) == tensors
    assert skeleton.dense_bytes < 0.9 * full


def test_detached_it_is_what_transformers_loads(checkpoint: Path) -> None:
    whole = load_reference_model(ModelSkeleton.of(checkpoint)).state_dict()
    for kernels in ("auto", "eager"):
        with served(checkpoint, True, kernels=kernels) as model:
            pass
        # Its state_dict is refused: it would lack the experts.
        held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        mine = {name: tensor for name, tensor in held if name in whole}
        lost = {name for name in whole if name not in mine}
        assert all(".experts." in name for name in lost)
        for name, tensor in mine.items():
            assert torch.equal(tensor, whole[name]), name
        tied = "lm_head.weight" in model.all_tied_weights_keys
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_closing_dequantises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends may have no memory for weights that nobody asks for."""
    path = str(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}))
    model, _ = load(path, cache="30%")
    decoded: list[StoredMatrix] = []
    monkeypatch.setattr(StoredMatrix, "decode", decoded.append)
    model.greenroom.close()
    model.greenroom.close()
    assert not decoded
    assert stored_matrix(model.lm_head) is not None
    with pytest.raises(ClosedError):
        model(ids(1, 3))
    monkeypatch.undo()
    model.greenroom.detach()
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_rounding_changes_little(checkpoint: Path) -> None:
    with served(checkpoint, True, kernels="rounded") as model:
        wanted = logits(model)[:, -1].float()
    with served(checkpoint, True) as model:
        mine = logits(model)[:, -1].float()
    # A router's close call may fall the other way; a wrong product is further off than the norm.
    assert (mine - wanted).norm() < 0.2 * wanted.norm()


def test_load_keeps_them_where_compiled_kernels_compute(tmp_path: Path) -> None:
    path = str(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"}))
    for options, there in (
        ({}, True),
        ({"kernels": "eager"}, False),
        ({"dtype": "float32"}, False),
        ({"memory": "8GiB"}, True),
    ):
        given = {} if "memory" in options else {"cache": "30%"}
        model, tokenizer = load(path, **given, **options)
        try:
            assert (stored_matrix(model.lm_head) is not None) == there
            assert (model.lm_head.weight is None) == there
            prompt = tokenizer("The green room", return_tensors="pt")
            out = model.generate(**prompt, max_new_tokens=3, do_sample=False)
            assert out.shape[1] == prompt["input_ids"].shape[1] + 3
        finally:
            model.greenroom.detach()
        assert model.lm_head.weight is not None


def test_what_the_model_s_code_computes_with_is_expanded() -> None:
    """Jamba multiplies with `dt_proj.weight` by itself."""
    model = ModelSkeleton.of(cached_tiny("jamba")).model
    used = _used_by_code(model)
    assert "dt_proj" in used
    assert not {"q_proj", "o_proj", "lm_head", "embed_tokens"} & used


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})
    skeleton = ModelSkeleton.of(path)
    skeleton.keep_dense_encoded()
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(CheckpointError) as error:
        skeleton.load()
    assert "truncated" in one_line(error)


@pytest.mark.parametrize(("rows", "stays"), [(256, True), (192, False)])
def test_a_matrix_whose_last_block_is_short_is_expanded(rows: int, stays: bool) -> None:
    """192 outputs have two rows of scales, for 128 and for 64 of them: kernels read 96 each."""
    scale = StoredTensor(0, "float32", (2, 1), 0, 8)
    shape = (rows, 128)
    matrix = StoredTensor(
        0, "float8_e4m3fn", shape, 8, rows * 128, "fp8", shape, unit=128, companions=(scale,)
    )
    assert (encoded_matrix(matrix, torch.bfloat16) is not None) is stays
