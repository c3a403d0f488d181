"""Speed of answers with `--speculate mtp` compared with none, by how often predictions are right.

    python benchmarks/mtp.py bench-data/glm-mtp [--caches 100% 75% 50% 25%] [--right 0 0.5 0.8 0.9]

The folder gets a checkpoint in GLM-4.5-Air's proportions with an MTP layer (5.3 GB): random
weights, whose layers add so little to hidden states that a token's successor depends on the token
alone, and that the MTP layer finds it. An answer is a given text: each token is the successor of
the one before with a probability of --right, and else a random one; so this share of predictions is
right. The column "measured" has the share that the layer predicts. Model and layer compute
everything as always. The router's bias makes some experts popular, so that two tokens have as many
experts in common as in recordings of trained models.

Each repetition answers once with transformers' loop and once with drafts, in turns (A B B A).
Ratios and intervals are over these pairs; above 1 drafts are faster.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

# isort: off
import greenroom  # before torch: it sets how OpenMP's threads wait

import torch

# isort: on
from checkpoints import make_tokenizer
from common import commit, machine, table
from safetensors.torch import load_file, save_file
from speculation import measured
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from greenroom.config import LoadConfig
from greenroom.hf.load.load import load_with
from greenroom.hf.text.drafting import DraftedLoop
from greenroom.hf.text.next_tokens import NextTokens

# The proportions of GLM-4.5-Air, whose hidden states have 4,096 numbers and which has 46 layers: of
# the bytes of a token half are dense, attention above all.
LAYERS, EXPERTS, TOP_K, WIDTH, HIDDEN, HEADS = 16, 128, 8, 384, 1024, 48
VOCABULARY = 14_000
# Two tokens then have 1.7 times the experts of one; in recordings 1.57 to 1.73 times.
GATE, SKEW = 0.05, 0.3
SHARE = 1e-4  # of what layers would add to hidden states: an embedding is 100 times their sum
TINY = {
    "layers": 2, "experts": 8, "top_k": 2, "width": 64, "hidden": 128, "heads": 2,
    "vocabulary": 1000,
}  # fmt: skip
LEAST_ID = 5
COLUMNS = (
    "experts in slots", "right", "measured", "tokens/s without", "tokens a pass", "with / without",
    "in CPU seconds",
)  # fmt: skip


def make(folder: Path, sizes: dict[str, int]) -> None:
    """Make the checkpoint, unless it is there."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    layers, hidden = sizes["layers"], sizes["hidden"]
    config = Glm4MoeConfig(
        vocab_size=sizes["vocabulary"], hidden_size=hidden, intermediate_size=2 * hidden,
        moe_intermediate_size=sizes["width"], num_hidden_layers=layers + 1,
        num_attention_heads=sizes["heads"], num_key_value_heads=max(1, hidden // 256), head_dim=64,
        n_routed_experts=sizes["experts"], num_experts_per_tok=sizes["top_k"], n_shared_experts=1,
        first_k_dense_replace=0, n_group=1, topk_group=1, max_position_embeddings=4096,
        use_qk_norm=True, dtype="bfloat16",
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weights *= SHARE
            elif name.endswith("gate.weight"):
                weights.normal_(std=GATE)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.normal_(std=SKEW)
    model.save_pretrained(folder, max_shard_size="100GB")
    del model
    add_mtp_tensors(folder / "model.safetensors", layers, hidden)
    make_tokenizer(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values.pop("num_mtp_layers", None)
    values |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(values))


def add_mtp_tensors(path: Path, layers: int, hidden: int) -> None:
    """Make the last layer of a checkpoint an MTP layer, which repeats the embedding it sees."""
    tensors, prefix = load_file(path), f"model.layers.{layers}."
    joined = torch.zeros(hidden, 2 * hidden)
    joined[:, :hidden] = torch.eye(hidden)
    own = {
        "eh_proj.weight": joined, "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden), "shared_head.norm.weight": torch.ones(hidden),
    }  # fmt: skip
    tensors |= {prefix + name: each.to(torch.bfloat16) for name, each in own.items()}
    save_file(tensors, path, {"format": "pt"})


@torch.inference_mode()
def text_of(model: Any, prompt: list[int], right: float, tokens: int) -> list[int]:
    """Return an answer in which a share of `right` tokens is what the model would say."""
    random, cache, ids, text = Random(1), None, prompt, list[int]()
    while len(text) < tokens:
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
        if random.random() >= right:
            token = random.randrange(LEAST_ID, model.config.vocab_size)
        text.append(token)
        ids = [token]
    return text


@torch.inference_mode()
def row_of(model: Any, cache: str, right: float, args: argparse.Namespace) -> list[str]:
    """Measure answers with and without drafts: a row of the table."""
    random = Random(0)
    prompt = [random.randrange(LEAST_ID, model.config.vocab_size) for _ in range(16)]
    text, loop = text_of(model, prompt, right, args.tokens), DraftedLoop(model)
    if loop.obstacle:
        raise SystemExit(loop.obstacle)
    found = right_share(model, prompt, text)
    cells = measured(model, f"{cache}, {right:g}", prompt, text, loop, args.repeats)
    return [cache, f"{right:.0%}", f"{found:.0%}", *cells]


def right_share(model: Any, prompt: list[int], text: list[int]) -> float:
    """Return the share of a text's tokens that the MTP layer predicts."""
    ids, guesses, right = list(prompt), NextTokens(model), 0
    with guesses.reading(ids):
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    for at, (token, following) in enumerate(pairwise(text)):
        ids.append(token)
        if at:
            guesses.see(ids, len(ids) - 2, 1)
        right += guesses.predict() == following
        model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    guesses.end()
    return right / (len(text) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the checkpoint, which is made if need be")
    parser.add_argument("--caches", nargs="+", default=["100%", "75%", "50%", "25%"])
    parser.add_argument("--right", type=float, nargs="+", default=[0, 0.5, 0.8, 0.9], metavar="P")
    parser.add_argument("--tokens", type=int, default=160, metavar="N", help="of an answer")
    parser.add_argument("--repeats", type=int, default=4, metavar="N")
    parser.add_argument("--tiny", action="store_true", help="a small checkpoint, to try the script")
    args = parser.parse_args()
    make(args.folder, TINY if args.tiny else {
        "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "width": WIDTH, "hidden": HIDDEN,
        "heads": HEADS, "vocabulary": VOCABULARY,
    })  # fmt: skip
    rows = []
    for cache in args.caches:
        model, _ = load_with(str(args.folder), LoadConfig(cache=cache, context=512), mtp=True)
        try:
            rows += [row_of(model, cache, right, args) for right in args.right]
        finally:
            model.greenroom.detach()
    print(f"commit {commit()}; {machine()}; greenroom {greenroom.__version__}\n")
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
