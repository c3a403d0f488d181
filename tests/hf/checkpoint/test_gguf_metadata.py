"""The config that GGUF metadata make: values that are computed, and what is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.metadata import config_from_metadata, makes_config
from greenroom.hf.checkpoint.gguf.metadata.reader import exact
from greenroom.hf.checkpoint.gguf.metadata.rope import LLAMA3, share
from greenroom.hf.checkpoint.gguf_file import read_gguf
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.pack.packing import pack
from tests.gguf_architectures import FOLDER
from tests.hf.conftest import one_line

WITHOUT = object()  # a key or a tensor that is left out
EMBEDDING = "token_embd.weight"
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
}


def header(name: str, changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> Header:
    """The header of a converted file with other values in its metadata, and other tensors."""
    paths, metadata, stored = read_gguf(FOLDER / name / "model.gguf")
    architecture = metadata["general.architecture"]
    changed = {
        key if key.startswith("tokenizer.") else f"{architecture}.{key}": value
        for key, value in changes.items()
    }
    values = {k: v for k, v in {**metadata, **changed}.items() if v is not WITHOUT}
    others = {k: v for k, v in {**stored, **(tensors or {})}.items() if v is not WITHOUT}
    return Header(paths, values, others)


def matrix(*shape: int) -> StoredTensor:
    return StoredTensor(0, "float32", shape, 0, 4 * math.prod(shape))


CORRECTIONS = {f"blk.{layer}.exp_probs_b.bias": WITHOUT for layer in range(3)}


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "words"),
    [
        ("deepseek_v3", {"expert_group_count": WITHOUT}, {}, "they lack deepseek2.expert_group_c"),
        ("olmoe", {"attention.layer_norm_rms_epsilon": WITHOUT}, {}, "olmoe.attention.layer_norm"),
        ("deepseek_v3", {"expert_gating_func": 1}, {}, "with a correction of scores is neither"),
        ("deepseek_v3", {"expert_gating_func": 2}, CORRECTIONS, "without a correction of scores"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, {}, "is not of a DeepSeek model"),
        ("deepseek_v3", YARN, {}, "they lack deepseek2.rope.scaling.yarn_log_multiplier"),
        ("deepseek_v3", YARN, {EMBEDDING: matrix(163840, 32)}, "rope.scaling.yarn_beta_fast"),
        ("mixtral", {"rope.scaling.type": "longrope"}, {}, "scaling longrope is not supported"),
        ("phimoe", {}, {"rope_factors_long.weight": matrix(4)}, "they lack short_mscale"),
        ("olmoe", {"attention.head_count_kv": [2, 4, 2]}, {}, "head_count_kv differs between"),
        ("mellum", {"attention.sliding_window_pattern": [True]}, {}, "has 1 values, but the model"),
        ("gemma4", {"attention.head_count_kv": [1, 2, 4]}, {}, "head_count_kv differs between"),
        ("gemma4", {}, {"rope_freqs.weight": WITHOUT}, "lacks the tensor rope_freqs.weight"),
        ("olmoe", {}, {EMBEDDING: WITHOUT}, f"the file lacks the tensor {EMBEDDING}"),
        ("qwen4_exp_text", {}, {"blk.1.indexer.k_proj.weight": WITHOUT}, "indexer.k_proj.weight"),
        ("qwen4_exp_text", {}, {"per_layer_token_embd.weight": WITHOUT}, "per_layer_token_embd"),
        ("minimax_m2", {"expert_gating_func": 1}, {}, "their router computes softmax, but"),
        ("cohere2_moe", {}, {"blk.0.ffn_gate_inp.weight": WITHOUT}, "prefix_dense_sliding_window"),
        ("deepseek_v4", {"attention.compress_ratios": [8, 4, 16]}, {}, "between layers of a kind"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0]}, {}, "not in equal distances"),
        ("jamba", {"attention.head_count_kv": [0, 0, 0]}, {}, "no layer has attention"),
        ("laguna", {}, {}, "do not have all values of a config"),
    ],
)  # fmt: skip
def test_metadata_that_make_no_config(
    name: str, changes: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    file = header(name, changes, tensors)
    with pytest.raises(UnsupportedModel) as error:
        config_from_metadata(file)
    assert words in one_line(error)
    assert "name its folder or hub id with --config" in one_line(error)
    assert not makes_config(file)


def test_impossible_values_are_errors_of_one_line() -> None:
    for changes, words in (
        ({"attention.head_count": "x"}, "make no valid config"),
        ({"attention.head_count": 0, "attention.key_length": WITHOUT}, "make no valid config"),
        ({"block_count": 1 << 30}, "block_count in the config is 1073741824"),
    ):
        with pytest.raises(CheckpointError) as error:
            config_from_metadata(header("qwen3_moe", changes))
        assert words in one_line(error)


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "expected"),
    [
        ("olmoe", {"attention.head_count_kv": WITHOUT}, {}, {"num_key_value_heads": 4}),
        ("olmoe", {"rope.freq_base": WITHOUT}, {}, {"rope_parameters.rope_theta": 1e4}),
        ("olmoe", {"attention.clamp_kqv": 8.0}, {}, {"clip_qkv": 8.0}),
        ("olmoe", {}, {"blk.1.attn_k.bias": matrix(16)}, {"attention_bias": True}),
        ("olmoe", {}, {"output.weight": WITHOUT}, {"tie_word_embeddings": True}),
        ("olmoe", {}, {EMBEDDING: matrix(80, 32)}, {"vocab_size": 80}),
        (
            "olmoe",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {},
            {"rope_parameters.rope_type": "linear", "rope_parameters.factor": 4.0},
        ),
        (
            "olmoe",
            {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7},
            {},
            {"eos_token_id": [5, 7], "bos_token_id": None},
        ),
        ("deepseek_v2", {"expert_group_count": 1}, {}, {"topk_method": "greedy"}),
        ("deepseek_v3", {"expert_weights_scale": 0.0}, {}, {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {}, {EMBEDDING: matrix(154880, 32)}, {"model_type": "glm4_moe_lite"}),
        (
            "deepseek_v3",  # as llama.cpp's converter writes DeepSeek V2 Lite: 0.1 * 0.707
            {**YARN, "rope.scaling.yarn_log_multiplier": float(np.float32(0.0707))},
            {},
            {
                "rope_parameters.mscale": 0.707,
                "rope_parameters.mscale_all_dim": 0.707,
                "rope_parameters.factor": 40.0,
                "rope_parameters.beta_fast": 32.0,
                "rope_parameters.original_max_position_embeddings": 4096,
            },
        ),
        ("llama4", {"interleave_moe_layer_step": 2}, {}, {"use_qk_norm": False}),
        ("mimo_v2_flash", {"attention.head_count_kv": [2, 4]}, {}, {"num_key_value_heads": 2}),
        (
            "gpt_oss",
            {"rope.scaling.yarn_attn_factor": 1.5},
            {},
            {"rope_parameters.attention_factor": 1.5, "rope_parameters.truncate": False},
        ),
        (
            "granitemoehybrid",
            {"rope.scaling.finetuned": True},
            {},
            {"position_embedding_type": "rope"},
        ),
        ("qwen3_5_moe", {"nextn_predict_layers": 1}, {}, {"num_hidden_layers": 1}),
    ],
)  # fmt: skip
def test_values_of_a_config(
    name: str, changes: dict[str, Any], tensors: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_from_metadata(header(name, changes, tensors)).to_dict()
    for key, value in expected.items():
        found: Any = config
        for part in key.split("."):
            found = found[part]
        assert found == value, key


def test_floats_are_the_numbers_that_were_written() -> None:
    for number in (1e-5, 1e-6, 2.5, 0.0707, 1.8, 2.446, 11158840.0):
        assert exact(float(np.float32(number))) == number
    assert exact(1 / 3) == 1 / 3  # a float of 64 bits
    assert exact(7) == 7


def test_the_share_of_rotated_dimensions_gives_their_number() -> None:
    for size in (8, 64, 80, 128, 192, 256):
        for dimensions in range(2, size + 1, 2):
            assert int(size * share(dimensions, size)["partial_rotary_factor"]) == dimensions


def llama3_factors(scaling: tuple[float, float, float, int], theta: float) -> list[float]:
    """Factors of frequencies, one by one as llama.cpp's converter has them."""
    factor, low, high, context = scaling
    factors = []
    for position in range(0, 8, 2):
        length = 2 * math.pi * theta ** (position / 8)
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def with_factors(folder: Path, factors: list[float], kind: type = np.float32) -> Header:
    """The header of a Mixtral file with factors of RoPE, in a file of their own."""
    path = folder / "factors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("rope_freqs.weight", np.array(factors, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (written,), _, tensors = read_gguf(path)
    stored = tensors["rope_freqs.weight"]
    moved = StoredTensor(1, stored.dtype, stored.shape, stored.offset, stored.nbytes)
    file = header("mixtral", {"rope.freq_base": 5e5}, {"rope_freqs.weight": moved})
    return Header((*file.paths, written), file.metadata, file.tensors)


def test_the_scaling_of_llama_3_and_4_by_its_factors(tmp_path: Path) -> None:
    for scaling in LLAMA3:
        config = config_from_metadata(with_factors(tmp_path, llama3_factors(scaling, 5e5)))
        parameters = config.rope_parameters
        names = ("factor", "low_freq_factor", "high_freq_factor")
        found = (
            *(parameters[name] for name in names),
            parameters["original_max_position_embeddings"],
        )
        assert (parameters["rope_type"], found) == ("llama3", scaling)


@pytest.mark.parametrize(
    ("factors", "kind", "words"),
    [
        ([1.0, 1.0, 5.0, 8.0], np.float32, "another RoPE scaling than Llama 3 and 4"),
        ([1.0, 1.0], np.float32, "has not a factor for two dimensions"),
        ([1.0, 1.0, 1.0, 1.0], np.float16, "is no list of factors in F32"),
    ],
)
def test_other_factors_of_rope(
    tmp_path: Path, factors: list[float], kind: type, words: str
) -> None:
    with pytest.raises(UnsupportedModel) as error:
        config_from_metadata(with_factors(tmp_path, factors, kind))
    assert words in one_line(error)


def test_a_pack_has_the_factors_of_rope(tmp_path: Path) -> None:
    file = Path(shutil.copy(FOLDER / "gemma4" / "model.gguf", tmp_path / "model.gguf"))
    pack(str(file), tmp_path / "pack", "int8")
    configs = [open_checkpoint(path).hf_config() for path in (file, tmp_path / "pack")]
    assert configs[0].to_dict() == configs[1].to_dict()
