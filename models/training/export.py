"""Write a training checkpoint as a Hugging Face folder: bfloat16 shards, tokenizer, chat template.

Written beside and renamed, so that ``models/demo`` is always whole. The model card and the figure,
which ``evaluate.py`` writes, are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from train import configuration
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeForCausalLM

LARGEST_FOLDER = 20_000_000
KEPT = ("README.md", "loss.png")


def make_portable(folder: Path) -> None:
    """Add the names by which other and older readers know what transformers 5 renamed."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config["num_local_experts"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    for transient in ("backend", "is_local", "local_files_only"):
        tokenizer.pop(transient, None)
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "extra_special_tokens" in tokenizer:
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    path.write_text(json.dumps(tokenizer, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path(".corpus/run/last.pt"))
    parser.add_argument("--tokenizer", type=Path, default=Path(".corpus/tokenizer"))
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = configuration(tokenizer)
    model = Qwen3MoeForCausalLM(config)
    state = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16).eval()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=256,
    )

    partial = options.out.with_name(options.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, max_shard_size="7MB")
    tokenizer.save_pretrained(partial)
    make_portable(partial)
    for name in KEPT:
        if (options.out / name).exists():
            shutil.copy(options.out / name, partial / name)
    shutil.rmtree(options.out, ignore_errors=True)
    partial.replace(options.out)

    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(
        f"{options.out}: step {state['step']}, {state['tokens']} tokens,"
        f" {model.num_parameters()} parameters, {size} bytes"
    )
    if size > LARGEST_FOLDER:
        raise SystemExit(f"larger than {LARGEST_FOLDER} bytes")


if __name__ == "__main__":
    main()
