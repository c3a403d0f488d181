"""GGUF files and configs that do not fit one another: one line that says what and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_architectures import FOLDER
from tests.hf.conftest import one_line


def rewritten(
    name: str, folder: Path, tensors: Mapping[str, Any] = {}, metadata: Mapping[str, Any] = {}
) -> Path:
    """A copy of a file of FOLDER with other tensors and metadata; None: without it."""
    shutil.copy(FOLDER / name / "config.json", folder)
    reader = gguf.GGUFReader(FOLDER / name / "model.gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "")
    writer.kv_data[0].clear()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            value = metadata.get(field.name, field.contents())
            sub = field.types[1] if len(field.types) > 1 else None
            if value is not None:
                writer.add_key_value(field.name, value, field.types[0], sub_type=sub)
    stored: dict[str, Any] = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    stored |= {key: None if value is None else (value, None) for key, value in tensors.items()}
    for key, pair in stored.items():
        if pair is not None:
            writer.add_tensor(key, pair[0], raw_dtype=pair[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def refusal(path: Path) -> str:
    """The message with which a file is refused, before any weight is read."""
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        ModelSkeleton.of(path)
    return one_line(error)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"model_type": "olmoe"}, "model type olmoe, but the file of the arch"),
        ("qwen3_moe", {"model_type": "llama"}, "model type llama, but the file of the arch"),
        ("qwen3_moe", {"hidden_size": 64}, "its hidden_size is 64, but embedding_length of the"),
        ("qwen3_moe", {"num_local_experts": 8}, "is 8, but expert_count of the file is 4"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "but expert_used_count of the file is 2"),
        ("qwen3_moe", {"num_hidden_layers": 2}, "it has 2 layers, but the file has 3"),
        ("qwen3_moe", {"vocab_size": 65}, "its vocabulary has 65 tokens, but that of the file has"),
        ("qwen3_moe", {"moe_intermediate_size": 8}, "do not fit the config"),
        ("qwen3_moe", {"head_dim": 16}, "has shape [32, 32], but the config says [64, 32]"),
        ("qwen3_moe", {"num_key_value_heads": 4}, "has shape [16, 32], but the config says"),
        ("mixtral", {"num_attention_heads": 8}, "its num_attention_heads is 8, but attention"),
        ("mixtral", {"num_key_value_heads": 4}, "do not fit the config"),
        ("deepseek_v3", {"kv_lora_rank": 8}, "do not fit the config"),
        ("deepseek_v3", {"v_head_dim": 16}, "do not fit the config"),
        ("granitemoehybrid", {"mamba_d_state": 16}, "the config says"),
        ("qwen3_moe", {"per_layer_config": {"1": {"num_attention_heads": 2}}}, "a per-layer attr"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "has shape [64, 32], but the config"),
        ("gemma4", {"text_config": {"hidden_size": 64}}, "its hidden_size is 64, but embedding"),
        ("olmoe", {"hidden_size": "wide"}, "not a valid olmoe config"),
    ],
)  # fmt: skip
def test_a_config_with_other_sizes(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(FOLDER / name / "model.gguf", tmp_path)
    message = refusal(tmp_path / "model.gguf")
    assert words in message, message
    assert str(tmp_path) in message


MATRIX = np.zeros((16, 32), np.float32)


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("qwen3_moe", {"blk.1.attn_q.weight": None}, "layers.1.self_attn.q_proj.weight is missing"),
        ("qwen3_moe", {"blk.1.ffn_up_exps.weight": None}, "ffn_gate_exps.weight"),
        ("qwen3_moe", {"blk.1.attn_qq.weight": MATRIX}, "for the tensor blk.1.attn_qq.weight"),
        ("qwen3_moe", {"blk.7.attn_q.weight": MATRIX}, "for the tensor blk.7.attn_q.weight"),
        ("qwen3_moe", {"blk.1.attn_output.weight": MATRIX}, "blk.1.attn_output.weight has shape"),
        ("mixtral", {"blk.1.attn_k.weight": MATRIX[:, :16]}, "blk.1.attn_k.weight [16, 16]"),
        ("deepseek_v3", {"blk.1.attn_v_b.weight": None}, "attn_k_b.weight"),
        ("deepseek_v3", {"blk.1.attn_k_b.weight": MATRIX}, "blk.1.attn_k_b.weight [16, 32]"),
        ("qwen3_next", {"blk.0.ssm_a": np.zeros(3, np.float32)}, "blk.0.ssm_a [3]"),
        ("kimi_linear", {"blk.0.ssm_conv1d_k.weight": MATRIX}, "ssm_conv1d_k.weight [16, 32]"),
        ("gemma4", {"blk.0.ffn_gate_inp.scale": None}, "layers.0.router.scale is missing"),
        ("bailing_hybrid", {"blk.0.ssm_g_a.weight": None}, "self_attn.g_proj.weight is missing"),
        ("glm5_next", {"blk.1.indexer_compressor_ape.weight": MATRIX}, "the config says [4, 16]"),
        ("granitemoe_swa", {"blk.1.ffn_up_shexp.weight": MATRIX}, "the config says [32, 32]"),
        ("hy_v4", {"output_hc_fn.weight": None}, "model.hc_head.hc_fn is missing"),
        ("dots3_note_text", {"blk.1.attn_k_norm.weight": None}, "only_layernorm.weight is missing"),
        ("minimax_m3_vl", {"blk.1.ffn_gate_shexp.weight": None}, "blk.1.ffn_up_shexp.weight"),
        ("qwen4_exp_text", {"blk.1.indexer.k_proj.weight": None}, "blk.1.indexer.q_proj.weight"),
        ("qwen4_exp_text", {"per_layer_token_embd.weight": MATRIX}, "the config says [1176, 2]"),
    ],
)  # fmt: skip
def test_missing_further_and_wrong_tensors(
    name: str, tensors: dict[str, Any], words: str, tmp_path: Path
) -> None:
    message = refusal(rewritten(name, tmp_path, tensors))
    assert words in message, message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen3_moe", "general.architecture", "olmoe", "but have no olmoe.block_count"),
        ("qwen3_moe", "general.architecture", "bert", "bert is not supported in GGUF files"),
        ("qwen3_moe", "qwen3moe.block_count", 2, "it has 3 layers, but the file has 2"),
        ("qwen3_moe", "qwen3moe.expert_count", 8, "is 4, but expert_count of the file is 8"),
        ("qwen3_moe", "qwen3moe.attention.head_count", 8, "head_count of the file is 8"),
        ("qwen4_exp_text", "qwen4exp.ple.head_offsets", [0, 1], "[2], but the config says [16]"),
        ("qwen4_exp_text", "qwen4exp.ple.layer_multipliers", None, "multipliers is missing"),
    ],
)  # fmt: skip
def test_metadata_that_contradict_the_config(
    name: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    message = refusal(rewritten(name, tmp_path, metadata={key: value}))
    assert words in message, message


def test_parameters_in_the_metadata_are_whole_numbers(tmp_path: Path) -> None:
    """An array of 64-bit floats in place of one of whole numbers (gguf's types 12 and 10)."""
    shutil.copy(FOLDER / "qwen4_exp_text" / "config.json", tmp_path)
    raw = bytearray((FOLDER / "qwen4_exp_text" / "model.gguf").read_bytes())
    kind = raw.index(b"ple.head_offsets") + len("ple.head_offsets") + 4
    assert raw[kind] == 10
    raw[kind] = 12
    (tmp_path / "model.gguf").write_bytes(raw)
    message = refusal(tmp_path / "model.gguf")
    assert "head_offsets must have whole numbers, but has the type float64" in message


def test_a_part_of_another_model(tmp_path: Path) -> None:
    """Both parts say that they are part of a model in two files."""
    shutil.copy(FOLDER / "qwen3_moe" / "config.json", tmp_path)
    for number, name in ((0, "qwen3_moe"), (1, "olmoe")):
        reader = gguf.GGUFReader(FOLDER / name / "model.gguf")
        writer = gguf.GGUFWriter(tmp_path / f"model-{number + 1:05}-of-00002.gguf", "")
        writer.kv_data[0].clear()
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF."):
                sub = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    message = refusal(tmp_path / "model-00001-of-00002.gguf")
    assert "model-00002-of-00002.gguf: the shapes of one expert's tensors" in message, message
