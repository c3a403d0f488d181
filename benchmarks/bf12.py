"""bfloat16 experts in 12 bits beside the same experts in 16, with equal memory for slots.

    python benchmarks/bf12.py MODEL [--pack FOLDER] [--shares 100 75 50 25] [--rounds 3]

MODEL is a folder of safetensors in bfloat16. Its pack in bf12 is made in --pack if it is not there
(default: beside the model). Each row has one share of MODEL's experts as bytes of slots, which both
get; at 100 % both have a slot for each expert. Processes come in turns; each fills its slots with a
few prompts, computes a prompt, and decodes random tokens. Ratios have intervals over rounds.

A first table describes the exponents: their entropy, the share of weights that have one of the 16
most frequent ones of their matrix, and the used part of the room for others, at most.

    python benchmarks/bf12.py demo --exponents
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Result,
    commit,
    decode_rate,
    machine,
    note,
    prefill_rate,
    run_worker,
    show_ratio,
    table,
)

from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.exponents import NUMBERS
from greenroom.hf.pack.packing import pack
from greenroom.runtime.encodings.bf12 import escape_room
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.store.disk import DiskStore, Staging

COLUMNS = (
    "slots", "bf16, tokens/s", "bf12", "ratio", "prompt of 128: bf16", "bf12", "ratio",
    "CPU ms a token: bf16", "bf12", "ratio", "MB read a token: bf16", "bf12",
)  # fmt: skip


def exponents(model: str, most: int = 64) -> str:
    """Describe the exponents of up to `most` experts, evenly spread, as a table."""
    catalog = ModelSkeleton.of(find_checkpoint(model)).catalog
    store, slots, staging = DiskStore(catalog), HostSlots(1, catalog.slot_bytes), Staging()
    counts: dict[str, np.ndarray] = {}
    covered: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for expert in range(0, catalog.experts, max(1, catalog.experts // most)):
        for chunk in store.chunks(expert):
            data = store.read(chunk, staging)
            slots.write(0, chunk.extent.copies, data, chunk.start)
        for spec in catalog.layouts[catalog.layer_of(expert)].tensors:
            bits = slots.tensor(0, spec).view(torch.int16).numpy().view(np.uint16)
            own = np.bincount((bits >> 7 & 255).ravel(), minlength=256)
            counts[spec.name] = counts.get(spec.name, np.zeros(256, np.int64)) + own
            rare = np.sort(own)[:-NUMBERS].sum()
            covered.setdefault(spec.name, []).append(1 - rare / bits.size)
            used.setdefault(spec.name, []).append(rare / escape_room(*bits.shape))
    rows = []
    for name, all_counts in counts.items():
        shares = all_counts[all_counts > 0] / all_counts.sum()
        entropy = float(-(shares * np.log2(shares)).sum())
        least, most_used = 100 * min(covered[name]), 100 * max(used[name])
        mean = 100 * float(np.mean(covered[name]))
        rows.append((name, f"{entropy:.2f}", f"{mean:.4f}", f"{least:.4f}", f"{most_used:.1f}"))
    return table(
        ("matrix", "entropy, bits", "% with a code", "the least", "% of the room used, at most"),
        rows,
    )


def one_run(folder: Path, cache: str, args: argparse.Namespace) -> Result:
    result = run_worker(
        "greenroom", folder, cache=cache, prompt=args.prompt, tokens=args.tokens, fill=args.fill
    )
    if "error" in result:
        raise SystemExit(f"{folder}: {result['error']}")
    return result


def row_of(share: float, folders: tuple[Path, Path], nbytes: int, args: Any) -> list[str]:
    """Measure both forms with slots for a share of the bytes of all experts in bfloat16."""
    cache = "100%" if share >= 100 else str(int(nbytes * share / 100))
    pairs = []
    for number in range(args.rounds):
        order = folders if number % 2 == 0 else folders[::-1]
        results = {folder: one_run(folder, cache, args) for folder in order}
        pairs.append(tuple(results[folder] for folder in folders))
        note(f"{share:g} %: round {number + 1} of {args.rounds}")
    cells = [f"{share:g} %"]
    for rate in (decode_rate, prefill_rate):
        rates = [(rate(plain), rate(packed)) for plain, packed in pairs]
        cells += [f"{np.median([pair[i] for pair in rates]):.1f}" for i in (0, 1)]
        cells.append(show_ratio([(packed, plain) for plain, packed in rates]))
    cpu = [tuple(each["token_cpu_s"] for each in pair) for pair in pairs]
    cells += [f"{1e3 * np.median([pair[i] for pair in cpu]):.1f}" for i in (0, 1)]
    cells.append(show_ratio(cpu))
    for i in (0, 1):
        read = [pair[i]["decode"]["bytes_read"] / len(pair[i]["token_s"]) for pair in pairs]
        cells.append(f"{np.median(read) / 1e6:.1f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder of safetensors in bfloat16")
    parser.add_argument("--pack", type=Path, help="its pack in bf12 (default: MODEL-bf12)")
    parser.add_argument("--shares", type=float, nargs="+", default=[100, 75, 50, 25], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--prompt", type=int, default=128, metavar="N")
    parser.add_argument("--tokens", type=int, default=100, metavar="N")
    parser.add_argument("--fill", type=int, default=3, metavar="N", help="prompts of 512 tokens")
    parser.add_argument("--exponents", action="store_true", help="only the table of exponents")
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}\n\n{args.model}\n\n{exponents(args.model)}\n")
    if args.exponents:
        return
    folder = Path(args.model)
    packed = args.pack or folder.with_name(f"{folder.name}-bf12")
    if not packed.exists():
        pack(str(folder), packed, "bf12")
    nbytes = ModelSkeleton.of(find_checkpoint(args.model)).catalog.all_experts_bytes
    rows = [row_of(share, (folder, packed), nbytes, args) for share in args.shares]
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
