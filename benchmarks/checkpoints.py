"""Make the benchmark checkpoints: random-weight Qwen3-MoE models of 3.44 GB in bf16.

    python benchmarks/checkpoints.py bench-data [--gguf]
    python benchmarks/checkpoints.py dry-run --tiny       # 30 MB in all: to try the scripts with

Hidden size 1024, 16 layers of 64 experts, top-8, expert size 512: one expert is 3.15 MB, and one
token uses 403 MB of experts and 152 MB of dense weights. Four folders differ only in the router:

    uniform    every expert is as likely as any other: the worst case for a cache
    zipf0.7, zipf1.0, zipf1.5
               the router adds -s * log(rank) to an expert's logit, with another random ranking
               in each layer, so that a softmax gives popularity rank ** -s. Single requests of
               real models are about as skewed as 0.7 (papers/expert_reuse.py)

The bias rides on channel 0 of the residual stream: the embedding holds a constant there that is
large enough to stay nearly constant through the norm, and the router's column 0 is the bias over
it. The layers (3.3 GB) are hard links to the same files, so four folders take 3.8 GB of disk.

Weights depend on the seed and the layer alone. Files of the right size are not written again, so
the script can resume after an interruption. `--gguf` writes the same weights as BF16 GGUF files
for llama.cpp (3.4 GB each; needs the package gguf); `--gguf-layers 64` makes larger ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VARIANTS = {"uniform": 0.0, "zipf0.7": 0.7, "zipf1.0": 1.0, "zipf1.5": 1.5}
CONSTANT = 6.0  # channel 0 of every embedding in the skewed variants


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-MoE model."""

    hidden: int = 1024
    layers: int = 16
    experts: int = 64
    top_k: int = 8
    expert_size: int = 512
    vocabulary: int = 32_000
    heads: int = 16
    kv_heads: int = 4
    head_size: int = 64

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": 2 * self.hidden,
            "moe_intermediate_size": self.expert_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": MOST_TOKENS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


MOST_TOKENS = 4096
FULL = Shape()
# The demo model's layers, experts and top-k: what was recorded of it can be replayed here.
TINY = Shape(
    hidden=128, layers=8, experts=32, top_k=4, expert_size=128, vocabulary=2048, heads=4,
    kv_heads=2, head_size=32,
)  # fmt: skip
SENTENCES = (
    "The experts wait in the green room until the router calls them.",
    "A cache keeps what was asked for lately, because it will be asked for again.",
    "def route(token): return sorted(experts, key=score)[:8]",
    "0123456789 () [] {} <> += -= == != # TODO: measure, then decide.",
)

Weights = dict[str, torch.Tensor]


def folder_of(root: Path, variant: str) -> Path:
    """Folder of a variant: `<root>/moe1.7b-<variant>`."""
    return root / f"moe1.7b-{variant}"


def layer_weights(shape: Shape, layer: int) -> Weights:
    """Attention, norms and the experts of one layer, one tensor each, as on the hub."""
    draw = torch.Generator().manual_seed(1000 + layer)
    prefix = f"model.layers.{layer}."

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=draw) * 0.02).to(torch.bfloat16)

    hidden, inner = shape.hidden, shape.expert_size
    wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    weights = {
        "self_attn.q_proj": random(wide, hidden),
        "self_attn.k_proj": random(narrow, hidden),
        "self_attn.v_proj": random(narrow, hidden),
        "self_attn.o_proj": random(hidden, wide),
        "self_attn.q_norm": torch.ones(shape.head_size, dtype=torch.bfloat16),
        "self_attn.k_norm": torch.ones(shape.head_size, dtype=torch.bfloat16),
        "input_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
        "post_attention_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for expert in range(shape.experts):
        weights[f"mlp.experts.{expert}.gate_proj"] = random(inner, hidden)
        weights[f"mlp.experts.{expert}.up_proj"] = random(inner, hidden)
        weights[f"mlp.experts.{expert}.down_proj"] = random(hidden, inner)
    return {f"{prefix}{name}.weight": tensor for name, tensor in weights.items()}


def rest_weights(shape: Shape, skew: float) -> Weights:
    """Embedding, head, last norm and routers; the routers differ between the variants."""
    hidden, experts = shape.hidden, shape.experts
    draw = torch.Generator().manual_seed(999)
    embedding = torch.randn(shape.vocabulary, hidden, generator=draw)
    head = torch.randn(shape.vocabulary, hidden, generator=draw) * 0.02
    if skew:
        embedding[:, 0] = CONSTANT
    normed = CONSTANT / math.sqrt((hidden - 1 + CONSTANT**2) / hidden)  # after RMSNorm
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    for layer in range(shape.layers):
        draw = torch.Generator().manual_seed(100 + layer)
        router = torch.randn(experts, hidden, generator=draw) / math.sqrt(hidden)  # logits N(0, 1)
        if skew:
            rank = torch.randperm(experts, generator=draw) + 1
            router[:, 0] = -skew * torch.log(rank.float()) / normed
        weights[f"model.layers.{layer}.mlp.gate.weight"] = router
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def write(path: Path, weights: Weights) -> None:
    """Write to a temporary file, then rename: an interrupted run leaves no partial file."""
    partial = path.with_suffix(".part")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path)


def is_complete(path: Path, index: dict[str, str]) -> bool:
    """Does a shard exist with all its bytes? If so, its tensors are added to the index."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (OSError, ValueError):
        return False
    header.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in header.values())
    if path.stat().st_size != 8 + header_bytes + end:
        return False
    index.update(dict.fromkeys(header, path.name))
    return True


def make_tokenizer(folder: Path) -> None:
    """A small byte-level BPE tokenizer: any text can be encoded; ids stay below the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MOST_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def refuse_another_shape(root: Path, folders: list[Path], config: dict[str, Any]) -> None:
    """Exit if a folder has a checkpoint of other sizes: its complete files would be reused."""
    for folder in folders:
        path = folder / "config.json"
        if path.exists() and json.loads(path.read_text()) != config:
            sys.exit(f"{folder}: a checkpoint of other sizes: choose another folder than {root}")


def make(root: Path, variants: list[str], shape: Shape = FULL) -> list[Path]:
    """Make the variants below `root`; the first one's layer files are linked into the others."""
    refuse_another_shape(root, [folder_of(root, variant) for variant in VARIANTS], shape.config())
    folders = [folder_of(root, variant) for variant in variants]
    index: dict[str, str] = {}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    for layer in range(shape.layers):
        name = f"layer-{layer:02d}.safetensors"
        existing = next(
            (f for v in VARIANTS if is_complete(f := folder_of(root, v) / name, index)), None
        )
        progress(f"layer {layer + 1} of {shape.layers}{' (kept)' if existing else ''}")
        for folder in folders:
            path = folder / name
            if existing is None:
                write(path, weights := layer_weights(shape, layer))
                index.update(dict.fromkeys(weights, name))
                existing = path
            elif not (path.exists() and path.samefile(existing)):
                path.unlink(missing_ok=True)
                os.link(existing, path)
    for folder, variant in zip(folders, variants, strict=True):
        progress(folder.name)
        rest_file = folder / "rest.safetensors"
        if not is_complete(rest_file, index):
            write(rest_file, weights := rest_weights(shape, VARIANTS[variant]))
            index.update(dict.fromkeys(weights, rest_file.name))
        make_tokenizer(folder)
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        )
    return folders


def progress(text: str) -> None:
    print(f"\r{text:40}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="make the benchmark checkpoints (3.8 GB)")
    parser.add_argument("root", type=Path, help="folder to make them in, such as bench-data")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument(
        "--gguf", nargs="*", choices=list(VARIANTS), metavar="VARIANT",
        help="also write these variants (zipf1.0 if none is named) as <folder>.gguf",
    )  # fmt: skip
    parser.add_argument(
        "--gguf-layers", type=int, metavar="N",
        help="layers of those files, the checkpoint's over and over: 64 make 13.3 GB, to be"
        " quantised for comparisons in less memory (default: the checkpoint's)",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="30 MB in all, to try the scripts with")
    args = parser.parse_args()
    start = time.perf_counter()
    shape = TINY if args.tiny else FULL
    folders = make(args.root, args.variants, shape)
    for variant in [] if args.gguf is None else args.gguf or ["zipf1.0"]:
        from gguf_file import write_gguf

        progress(f"GGUF of {variant}")
        layers = args.gguf_layers or shape.layers
        size = f"{FULL.layers * layers / shape.layers * 0.105:.1f}b"  # of parameters, when full
        path = args.root / f"moe{size}-{variant}.gguf"
        write_gguf(folder_of(args.root, variant), path, layers)
    print(f"\r{len(folders)} checkpoints in {args.root}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
