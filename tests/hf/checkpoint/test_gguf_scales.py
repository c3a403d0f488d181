"""NVFP4 of GGUF files whose matrices have scales of their own, as llama.cpp's converter writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.gguf.scales import with_matrix_scales
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.stored import stored_matrix
from tests.gguf_models import DATA
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.quantised_floats import modelopt_for_llama

FILE = DATA / "modelopt" / "nvfp4.gguf"
SCALED = "gguf_nvfp4_scaled"


def test_the_weights_are_those_of_the_converted_checkpoint(tmp_path: Path) -> None:
    original = ModelSkeleton.of(modelopt_for_llama(tmp_path), "float32")
    skeleton = ModelSkeleton.of(FILE, "float32")
    assert {*original.catalog.layouts[0].encodings.values()} == {"nvfp4"}
    assert {*skeleton.catalog.layouts[0].encodings.values()} == {SCALED}
    wanted = dict(load_reference_model(original).named_parameters())
    for name, parameter in load_reference_model(skeleton).named_parameters():
        # ModelOpt multiplies the two scales first: another rounding.
        torch.testing.assert_close(parameter, wanted[name], rtol=3e-7, atol=0)


def test_eager_has_the_reference_s_bits_and_default_kernels_are_near() -> None:
    whole, tokens = load_reference_model(ModelSkeleton.of(FILE)), ids(2, 9) % 64
    with streamed(FILE, capacity=2, kernels="eager") as model:
        assert_same(model, whole, tokens)
    with streamed(FILE, capacity=2) as model, torch.inference_mode():
        mine, wanted = (each(input_ids=tokens, use_cache=False).logits for each in (model, whole))
        assert (mine - wanted).norm() < 0.05 * wanted.norm()


def test_dense_matrices_stay_as_stored() -> None:
    whole = dict(ModelSkeleton.of(FILE).load().named_parameters())
    skeleton = ModelSkeleton.of(FILE)
    skeleton.keep_dense_encoded()
    model = skeleton.load()
    for part in "qkvo":
        name = f"model.layers.0.self_attn.{part}_proj"
        stored = stored_matrix(model.get_submodule(name))
        assert stored is not None
        assert torch.equal(stored.decode(), whole[f"{name}.weight"])


def tensors() -> tuple[tuple[Path, ...], dict[str, StoredTensor]]:
    paths, _, found = read_gguf(FILE)
    return paths, found


def test_scales_of_activations_are_left_out_where_they_belong_to_nvfp4() -> None:
    paths, found = tensors()
    assert "blk.0.attn_q.input_scale" in found
    assert not [name for name in with_matrix_scales(paths, "qwen3moe", found) if "scale" in name]
    found["blk.0.ffn_gate_inp.input_scale"] = found["blk.0.attn_q.input_scale"]
    left = [name for name in with_matrix_scales(paths, "qwen3moe", found) if "scale" in name]
    assert left == ["blk.0.ffn_gate_inp.input_scale"]  # refused by name, as any other tensor


def test_gemma_4_has_the_scales_of_down_as_a_parameter() -> None:
    paths, found = tensors()
    combined = with_matrix_scales(paths, "gemma4", found)
    assert [name for name in combined if name.endswith("scale")] == ["blk.0.ffn_down_exps.scale"]
    assert combined["blk.0.ffn_down_exps.weight"].encoding == "gguf_nvfp4"
    assert combined["blk.0.ffn_up_exps.weight"].encoding == SCALED


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blk.0.ffn_up_exps.scale", {"shape": (3,)}),
        ("blk.0.attn_q.scale", {"shape": (2,)}),
        ("blk.0.attn_q.scale", {"dtype": "float16"}),
    ],
)
def test_scales_that_do_not_fit(name: str, change: dict[str, object]) -> None:
    paths, found = tensors()
    found[name] = replace(found[name], **change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"{name} has shape .* a scale for each matrix"):
        with_matrix_scales(paths, "qwen3moe", found)


def test_a_scale_beside_another_type_is_refused(tmp_path: Path) -> None:
    """Only NVFP4 has scales beside it."""
    from tests.hf.index.test_gguf import extra, rewritten

    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(rewritten(tmp_path, "mixtral", extra, {"attn_q.weight": "Q8_0"}))
    assert "no parameter for the tensor blk.0.attn_q.scale" in one_line(error)
