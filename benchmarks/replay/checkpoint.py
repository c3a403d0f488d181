"""Make a checkpoint with OLMoE-1B-7B's shapes and random weights, for replays of its recordings.

    python benchmarks/replay/checkpoint.py bench-data [--layers 8]
    python benchmarks/replay/checkpoint.py dry-run --tiny      # 1 MB a layer: to try the scripts

Hidden size 2048, 64 experts of 1024 a layer, top-8, bf16: one expert is 12.6 MB, one layer 0.84 GB;
16 layers are 13.4 GB, 8 layers 6.8 GB. The vocabulary is small (8192; a recording's token ids are
numbered anew), so that a token's time is that of its layers. What the experts compute is noise:
the routing of a replay is forced (forced.py), and its times depend on shapes alone.

Weights depend on the layer alone: checkpoints of fewer layers are hard links to the same files, and
files of the right size are not written again, so the script can resume after an interruption. One
layer is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checkpoints import Weights, is_complete, make_tokenizer, progress, refuse_another_shape, write

LAYERS = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of an OLMoE model."""

    hidden: int = 2048
    experts: int = 64
    top_k: int = 8
    expert_size: int = 1024
    vocabulary: int = 8192
    heads: int = 16

    def config(self, layers: int) -> dict[str, Any]:
        """The config.json of a checkpoint of so many layers."""
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "hidden_size": self.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "intermediate_size": self.expert_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": False,
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "clip_qkv": None,
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        }


FULL = Shape()
TINY = Shape(hidden=64, experts=64, top_k=8, expert_size=32, vocabulary=2048, heads=4)


def folder_of(root: Path, layers: int) -> Path:
    """Folder of a checkpoint: `<root>/olmoe-<layers>`."""
    return root / f"olmoe-{layers}"


def layer_weights(shape: Shape, layer: int) -> Weights:
    """Attention, norms, router and experts of one layer, one tensor each, as on the hub."""
    draw = torch.Generator().manual_seed(2000 + layer)

    hidden, inner = shape.hidden, shape.expert_size

    def random(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).uniform_(-0.035, 0.035, generator=draw)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {f"self_attn.{name}_proj": random(hidden, hidden) for name in "qkvo"}
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm",
                 "self_attn.k_norm"):  # fmt: skip
        weights[name] = ones.clone()
    weights["mlp.gate"] = random(shape.experts, hidden)
    for expert in range(shape.experts):
        weights[f"mlp.experts.{expert}.gate_proj"] = random(inner, hidden)
        weights[f"mlp.experts.{expert}.up_proj"] = random(inner, hidden)
        weights[f"mlp.experts.{expert}.down_proj"] = random(hidden, inner)
    return {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in weights.items()}


def rest_weights(shape: Shape) -> Weights:
    """Embedding, head and last norm."""
    draw = torch.Generator().manual_seed(1999)
    size, kind = (shape.vocabulary, shape.hidden), torch.bfloat16
    return {
        "model.embed_tokens.weight": torch.empty(size, dtype=kind).normal_(generator=draw),
        "model.norm.weight": torch.ones(shape.hidden, dtype=kind),
        "lm_head.weight": torch.empty(size, dtype=kind).uniform_(-0.035, 0.035, generator=draw),
    }


def make(root: Path, layers: int, shape: Shape = FULL) -> Path:
    """Make the checkpoint of so many layers below `root`; its folder."""
    for number in range(1, LAYERS + 1):
        refuse_another_shape(root, [folder_of(root, number)], shape.config(number))
    folder, config = folder_of(root, layers), shape.config(layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    index: dict[str, str] = {}
    for layer in range(layers):
        name = f"layer-{layer:02d}.safetensors"
        others = (path for path in root.glob(f"olmoe-*/{name}"))
        existing = next(
            (path for path in [folder / name, *others] if is_complete(path, index)), None
        )
        progress(f"layer {layer + 1} of {layers}{' (kept)' if existing else ''}")
        if existing is None:
            write(folder / name, weights := layer_weights(shape, layer))
            index.update(dict.fromkeys(weights, name))
        elif existing != folder / name:
            (folder / name).unlink(missing_ok=True)
            os.link(existing, folder / name)
    if not is_complete(folder / "rest.safetensors", index):
        write(folder / "rest.safetensors", weights := rest_weights(shape))
        index.update(dict.fromkeys(weights, "rest.safetensors"))
    make_tokenizer(folder)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="make a checkpoint of OLMoE-1B-7B's shapes")
    parser.add_argument("root", type=Path, help="folder to make it in, such as bench-data")
    parser.add_argument("--layers", type=int, default=8, choices=range(1, LAYERS + 1), metavar="N",
                        help="1 to 16, 0.84 GB each (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="1 MB a layer, to try the scripts with")
    args = parser.parse_args()
    start = time.perf_counter()
    folder = make(args.root, args.layers, TINY if args.tiny else FULL)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"\r{folder}: {size / 1e9:.1f} GB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
