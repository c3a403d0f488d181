"""Write a benchmark checkpoint (see checkpoints.py) as a BF16 GGUF file, for llama.cpp.

The weights are the same bits; norms and routers become float32, as llama.cpp wants them. Tensors
are written one after another, so memory stays at one layer's experts. Needs the package gguf.

    python benchmarks/gguf_file.py MODEL-Q4_0.gguf LARGER-Q4_0.gguf --layers 128
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

DENSE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
FLOAT32 = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
Entry = tuple[str, tuple[int, ...], bool, Callable[[], torch.Tensor]]


def write_gguf(folder: Path, path: Path, layers: int | None = None) -> None:
    """Write a checkpoint folder as a GGUF file, unless the file exists.

    With more `layers` than the folder has, its layers repeat: a larger file of the same kind.
    """
    if path.exists():
        return
    config = json.loads((folder / "config.json").read_text())
    own_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers or own_layers
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), "qwen3moe")
    _describe(writer, config)
    _tokenizer(writer, folder, config["vocab_size"])
    entries = _entries(folder, config, own_layers)
    for name, shape, bf16, _ in entries:
        n = int(np.prod(shape))
        if bf16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, shape, np.dtype(np.uint16), n * 2, raw_dtype=kind)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), n * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, bf16, read in entries:
        tensor = read().contiguous()
        data = tensor.view(torch.int16).numpy().view(np.uint8) if bf16 else tensor.float().numpy()
        writer.write_tensor_data(data)
    writer.close()
    partial.replace(path)


def _entries(folder: Path, config: dict, own_layers: int) -> list[Entry]:
    """(name, shape, whether bf16, how to read it) of every tensor, in file order."""
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: safe_open(folder / name, "pt") for name in set(where.values())}

    def entry(name: str, source: str, bf16: bool = True) -> Entry:
        shape = tuple(shards[where[source]].get_slice(source).get_shape())
        return name, shape, bf16, lambda: shards[where[source]].get_tensor(source)

    def stacked(name: str, sources: list[str]) -> Entry:
        shape = tuple(shards[where[sources[0]]].get_slice(sources[0]).get_shape())
        return (name, (len(sources), *shape), True,
                lambda: torch.stack([shards[where[s]].get_tensor(s) for s in sources]))  # fmt: skip

    entries = [
        entry("token_embd.weight", "model.embed_tokens.weight"),
        entry("output_norm.weight", "model.norm.weight", bf16=False),
        entry("output.weight", "lm_head.weight"),
    ]
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer % own_layers}.", f"blk.{layer}."
        for ours, theirs in DENSE.items():
            entries.append(entry(f"{target}{ours}.weight", f"{source}{theirs}.weight"))
        for ours, theirs in FLOAT32.items():
            entries.append(entry(f"{target}{ours}.weight", f"{source}{theirs}.weight", bf16=False))
        for part in ("gate", "up", "down"):
            names = [
                f"{source}mlp.experts.{e}.{part}_proj.weight" for e in range(config["num_experts"])
            ]
            entries.append(stacked(f"{target}ffn_{part}_exps.weight", names))
    return entries


def _describe(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_name("random-moe")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """The checkpoint's tokens, padded to the vocabulary; llama.cpp wants one text an id."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 2 else 1 for i in range(len(tokens))])  # 3: control
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def deepen(path: Path, larger: Path, layers: int) -> None:
    """Write a GGUF file with more layers: copies of the layers of another one.

    An existing file is not written again.
    """
    if larger.exists():
        return
    reader = gguf.GGUFReader(path)
    architecture = str(reader.get_field("general.architecture").contents())
    own_layers = int(reader.get_field(f"{architecture}.block_count").contents())
    partial = larger.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = layers if field.name.endswith(".block_count") else field.contents()
        writer.add_key_value(field.name, value, field.types[0], kind)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    entries = [(name, tensor) for name, tensor in stored.items() if not name.startswith("blk.")]
    for layer in range(layers):
        source = f"blk.{layer % own_layers}."
        entries += [
            (f"blk.{layer}.{name.removeprefix(source)}", tensor)
            for name, tensor in stored.items()
            if name.startswith(source)
        ]
    for name, tensor in entries:
        data = tensor.data
        raw = tensor.tensor_type if data.dtype == np.uint8 else None
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in entries:
        writer.write_tensor_data(tensor.data)
    writer.close()
    partial.replace(larger)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A GGUF file of more layers, from its own.")
    parser.add_argument("path", type=Path)
    parser.add_argument("larger", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    chosen = parser.parse_args()
    deepen(chosen.path, chosen.larger, chosen.layers)
