"""Memory of a model with adapters in one server, beside a server for each; no model is loaded.

    python benchmarks/adapters.py MODEL [--adapters 2] [--share 5] [--out DIR]

MODEL is a folder of safetensors with a tensor for each expert's matrix. Adapters of it are made in
--out, in the form of ESFT's: each has SHARE % of every layer's experts, at random, with noise. They
can be served: `greenroom serve MODEL --adapter DIR/adapter-1 --adapter DIR/adapter-2`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from common import table
from safetensors.torch import save_file

from greenroom.config import show_bytes
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.adapter import LISTED, NUMBERS
from greenroom.hf.variants.index import Adapters

COLUMNS = "", "experts", "their bytes", "dense parts", "together", "of one model"
NOISE = 2.0  # in standard deviations of a matrix: answers differ


def make_adapter(checkpoint: Checkpoint, share: float, to: Path, seed: int) -> Path:
    """Write an adapter with `share` of every layer's experts, changed by noise."""
    numbered = {name: match for name in checkpoint.stored if (match := NUMBERS.search(name))}
    if not numbered:
        raise SystemExit(f"{checkpoint.folder}: needs a tensor for each expert's matrix")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    experts: dict[str, list[int]] = {}
    for layer in sorted({match[1] for match in numbered.values()}, key=int):
        present = {int(match[2]) for match in numbered.values() if match[1] == layer}
        experts[layer] = sorted(draw.sample(sorted(present), max(1, round(share * len(present)))))
    changed = {}
    for name, match in numbered.items():
        if int(match[2]) in experts[match[1]]:
            weight = checkpoint.read_stored(name)
            noise = NOISE * weight.float().std() * torch.randn(weight.shape, generator=generator)
            changed[name.removeprefix("model.")] = (weight + noise).to(weight.dtype)
    to.mkdir(parents=True, exist_ok=True)
    save_file(changed, to / "adapter.safetensors")
    (to / LISTED).write_text(json.dumps({"experts": experts}))
    return to


def rows(checkpoint: Checkpoint, folders: list[Path]) -> list[tuple[str, str, str, str, str, str]]:
    """Compare the memory of all variants in servers of their own, and in one."""
    model = ModelSkeleton.of(checkpoint)
    adapters = Adapters(tuple(map(str, folders)), as_variants=True)
    joined = ModelSkeleton.of(checkpoint, adapters=adapters)
    count, one = len(folders) + 1, model.catalog.all_experts_bytes + model.dense_bytes
    cases = (
        ("the model", model.catalog.experts, model.catalog.all_experts_bytes, model.dense_bytes),
        (f"{count} servers", count * model.catalog.experts,
         count * model.catalog.all_experts_bytes, count * model.dense_bytes),
        (f"one server, {count - 1} adapters", joined.catalog.experts,
         joined.catalog.all_experts_bytes, joined.dense_bytes),
    )  # fmt: skip
    return [
        (
            name, f"{experts:,}", show_bytes(nbytes), show_bytes(dense), show_bytes(nbytes + dense),
            f"{(nbytes + dense) / one:.2f}",
        )
        for name, experts, nbytes, dense in cases
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--adapters", type=int, default=2, metavar="N")
    parser.add_argument("--share", type=float, default=5.0, metavar="PERCENT")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: a temporary folder")
    args = parser.parse_args()
    checkpoint = find_checkpoint(args.model)
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        folders = [
            make_adapter(checkpoint, args.share / 100, out / f"adapter-{number}", number)
            for number in range(1, args.adapters + 1)
        ]
        print(table(COLUMNS, rows(checkpoint, folders)))


if __name__ == "__main__":
    main()
