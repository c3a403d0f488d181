"""Opening a model of any size costs its headers; sparse files stand for the largest models."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.skeleton import ModelSkeleton

PAGE = os.sysconf("SC_PAGE_SIZE")
READ_AHEAD = 1 << 20  # of the kernel, for a file
EXPERTS, VOCABULARY = 384, 4096
HIDDEN, WIDTH = 1024, 256  # an index of larger matrices is no larger, and takes longer to make
WIDE = 7168, 2048  # of the GGUF files, whose size counts
LAYERS = 3  # of 60, so a twentieth of the limit
MOST_BYTES = 50_000_000 * LAYERS // 60


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def bytes_in_memory(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.size // PAGE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    places = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size)
    assert libc.mincore(*places, pages.ctypes.data_as(ctypes.c_void_p)) == 0, ctypes.get_errno()
    return int((pages & 1).sum()) * PAGE


def held(build: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the bytes of memory that it keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        result = build()
        gc.collect()
        return result, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def tensors_of(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """DeepSeek-V3's matrices of one layer, with those of each expert."""
    at = f"model.layers.{layer}."
    for name, shape in (("q_a_proj", (1536, HIDDEN)), ("q_b_proj", (12_288, 1536)),
                        ("kv_a_proj_with_mqa", (576, HIDDEN)), ("kv_b_proj", (16_384, 512)),
                        ("o_proj", (HIDDEN, 8192))):  # fmt: skip
        yield f"{at}self_attn.{name}.weight", shape
    for expert in ("shared_experts", *(f"experts.{n}" for n in range(EXPERTS))):
        for part in ("gate", "up", "down"):
            shape = (HIDDEN, WIDTH) if part == "down" else (WIDTH, HIDDEN)
            yield f"{at}mlp.{expert}.{part}_proj.weight", shape


def plain_of(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    at = f"model.layers.{layer}."
    yield at + "mlp.gate.weight", (EXPERTS, HIDDEN)
    yield at + "mlp.gate.e_score_correction_bias", (EXPERTS,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", (HIDDEN,)
    yield at + "self_attn.q_a_layernorm.weight", (1536,)
    yield at + "self_attn.kv_a_layernorm.weight", (512,)


@pytest.fixture(scope="module")
def safetensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse FP8 checkpoint with one tensor an expert, and its scales."""
    folder = tmp_path_factory.mktemp("sparse")
    config = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18_432,
        "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "qk_rope_head_dim": 64, "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    table = {}
    for part in range(LAYERS + 1):
        name, header, end = f"model-{part}.safetensors", {}, 0
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        if part < LAYERS:
            for tensor, shape in tensors_of(part):
                entries.append((tensor, "F8_E4M3", shape, 1))
                scales = tuple(-(-n // 128) for n in shape)
                entries.append((tensor + "_scale_inv", "F32", scales, 4))
            entries += [(tensor, "BF16", shape, 2) for tensor, shape in plain_of(part)]
        else:
            rows = {"model.embed_tokens": (VOCABULARY,), "lm_head": (VOCABULARY,), "model.norm": ()}
            entries = [(f"{n}.weight", "BF16", (*rest, HIDDEN), 2) for n, rest in rows.items()]
        for tensor, dtype, shape, size in entries:
            begin, end = end, end + prod(shape) * size
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / name, 8 + len(text) + end)
        table.update(dict.fromkeys(header, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


def test_an_index_of_a_tensor_an_expert_takes_few_bytes(safetensors: Path) -> None:
    ModelSkeleton.of(find_checkpoint(str(safetensors)))  # imports, and tables of transformers
    headers = sum(
        int.from_bytes(path.open("rb").read(8), "little")
        for path in safetensors.glob("*.safetensors")
    )
    files = [safetensors / "config.json", safetensors / "model.safetensors.index.json"]
    before = bytes_read()
    (checkpoint, skeleton), nbytes = held(lambda: opened(safetensors))
    assert bytes_read() - before < headers + sum(f.stat().st_size for f in files) + (1 << 20)
    assert len(skeleton.catalog.offsets) == LAYERS + 1
    assert nbytes < MOST_BYTES
    # What verification alone needs is read when it is asked for.
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"
    assert name not in checkpoint.tensors
    assert checkpoint.stored[name].shape == (2, 8)
    assert len(checkpoint.stored) > len(checkpoint.tensors)


def opened(path: Path) -> tuple[Any, ModelSkeleton]:
    checkpoint = find_checkpoint(str(path))
    skeleton = ModelSkeleton.of(checkpoint)
    assert skeleton.catalog.experts == LAYERS * EXPERTS
    return checkpoint, skeleton


def write_parts(folder: Path, count: int) -> Path:
    """A sparse GGUF model of a layer a part: 9.5 GB each; return the first part."""
    hidden, width = WIDE
    paths = [folder / f"m-{n + 1:05}-of-{count:05}.gguf" for n in range(count)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), "qwen3moe")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        if number == 0:
            for key, value in {
                "context_length": 4096, "embedding_length": hidden, "block_count": count,
                "feed_forward_length": width, "attention.head_count": 64, "expert_count": EXPERTS,
                "attention.head_count_kv": 8, "attention.key_length": 128,
                "expert_used_count": 8, "expert_feed_forward_length": width,
            }.items():  # fmt: skip
                writer.add_uint32(f"qwen3moe.{key}", value)
            writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
            writer.add_float32("qwen3moe.rope.freq_base", 1e6)
            writer.add_token_list([f"token {n}" for n in range(VOCABULARY)])
        at = f"blk.{number}."
        matrices = {
            f"{at}ffn_{part}_exps.weight": (EXPERTS, width, hidden) for part in ("up", "gate")
        }
        matrices[f"{at}ffn_down_exps.weight"] = (EXPERTS, hidden, width)
        if number == 0:
            matrices["token_embd.weight"] = (VOCABULARY, hidden)
        end = 0
        for name, shape in matrices.items():
            stored = (*shape[:-1], shape[-1] // 256 * 144)
            writer.add_tensor_info(
                name, stored, np.dtype(np.uint8), prod(stored), gguf.GGMLQuantizationType.Q4_K
            )
            end += prod(stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        os.truncate(path, -(-path.stat().st_size // 32) * 32 + end)
    return paths[0]


def test_parts_of_500_gb_are_opened_by_their_headers(tmp_path: Path) -> None:
    count = 60
    first = write_parts(tmp_path, count)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert sum(path.stat().st_size for path in parts) > 500e9
    GgufCheckpoint.open(first)
    before = bytes_read()
    checkpoint, nbytes = held(lambda: GgufCheckpoint.open(first))
    assert len(checkpoint.tensors) == 3 * count + 1
    assert bytes_read() - before < 1 << 20
    assert sum(map(bytes_in_memory, parts[::30])) < 3 * READ_AHEAD
    assert nbytes < 1_000_000
