"""bfloat16 experts in 12 bits beside the same experts in 16, with equal memory for slots.

    python benchmarks/bf12.py MODEL [--pack FOLDER] [--shares 100 75 50 25] [--rounds 3]

MODEL is a folder of safetensors in bfloat16. Its pack in bf12 is made in --pack if it is not there
(default: beside the model). Each row has one share of MODEL's experts as bytes of slots, which both
get; at 100 % both have a slot for each expert. Both are in one process, and fill their slots with a
few prompts. In each round both compute a prompt, and decode the same random tokens in turns of 8.
Ratios have intervals over turns; above 1 bf12 is faster, or takes fewer CPU seconds.

A first table describes the exponents: their entropy, the share of weights that have one of the 16
most frequent ones of their matrix, and the used part of the room for others, at most.

    python benchmarks/bf12.py demo --exponents
    python benchmarks/bf12.py demo --types

The second one shows what codes of exponents would save in other types, to which MODEL's weights are
converted: bits a weight, of the type's, and the share of weights that have no code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# isort: off
import greenroom  # before torch: it sets how OpenMP's threads wait

import numpy as np
import torch

# isort: on
from common import commit, machine, note, show_ratio, table
from worker import Passes, counters, fill

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
EXPONENT_BITS = {"bfloat16": (16, 8), "float16": (16, 5), "float8_e4m3": (8, 4)}  # of all bits
BLOCK = 8  # tokens that a form decodes before it is the other's turn


def matrices(model: str, most: int = 64) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of up to `most` experts, evenly spread: names and weights in bfloat16."""
    catalog = ModelSkeleton.of(find_checkpoint(model)).catalog
    store, slots, staging = DiskStore(catalog), HostSlots(1, catalog.slot_bytes), Staging()
    for expert in range(0, catalog.experts, max(1, catalog.experts // most)):
        for chunk in store.chunks(expert):
            data = store.read(chunk, staging)
            slots.write(0, chunk.extent.copies, data, chunk.start)
        for spec in catalog.layouts[catalog.layer_of(expert)].tensors:
            yield spec.name, slots.tensor(0, spec)


def entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def exponents(model: str) -> str:
    """Describe the exponents of a model's experts, as a table."""
    counts: dict[str, np.ndarray] = {}
    covered: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for name, weights in matrices(model):
        own = count_of(weights, "bfloat16")
        counts[name] = counts.get(name, np.zeros(256, np.int64)) + own
        rare = np.sort(own)[:-NUMBERS].sum()
        covered.setdefault(name, []).append(1 - rare / weights.numel())
        used.setdefault(name, []).append(rare / escape_room(*weights.shape))
    rows = []
    for name, all_counts in counts.items():
        least, most_used = 100 * min(covered[name]), 100 * max(used[name])
        mean = 100 * float(np.mean(covered[name]))
        rows.append((
            name, f"{entropy(all_counts):.2f}", f"{mean:.4f}", f"{least:.4f}", f"{most_used:.1f}"
        ))  # fmt: skip
    return table(
        ("matrix", "entropy, bits", "% with a code", "the least", "% of the room used, at most"),
        rows,
    )


def count_of(weights: torch.Tensor, dtype: str) -> np.ndarray:
    """Count the exponents of a matrix in a type: 256 counts.

    For float8 each block of 128 x 128 weights has a scale with which its largest is 448.
    """
    if dtype == "bfloat16":
        bits = weights.view(torch.int16).int() >> 7 & 255
    elif dtype == "float16":
        bits = weights.half().view(torch.int16).int() >> 10 & 31
    else:
        bits = torch.cat([
            (block * (448 / block.abs().amax())).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
            for rows in weights.float().split(128)
            for block in rows.split(128, 1)
        ]).int() >> 3 & 15  # fmt: skip
    return np.bincount(bits.flatten().numpy(), minlength=256)


def types(model: str) -> str:
    """Compare what codes of exponents would save in several types, as a table.

    A code of k bits stands for one of 2 ** k exponents; weights with another one are listed, in 32
    bits each. Exponents are numbered anew in each matrix.
    """
    of_type: dict[str, list[np.ndarray]] = {dtype: [] for dtype in EXPONENT_BITS}
    for _, weights in matrices(model):
        for dtype, counted in of_type.items():
            counted.append(count_of(weights, dtype))
    rows = []
    for dtype, counted in of_type.items():
        width, exponent = EXPONENT_BITS[dtype]
        total = sum(int(each.sum()) for each in counted)
        coder = width - exponent + entropy(np.sum(counted, axis=0))
        cells = [dtype, f"{coder:.2f} ({100 * coder / width:.0f} %)"]
        for k in (4, 3, 2):
            others = sum(int(np.sort(each)[: -(1 << k)].sum()) for each in counted) / total
            bits = width - exponent + k + 32 * others
            cells.append(f"{bits:.2f} ({100 * bits / width:.0f} %), {100 * others:.2g} %")
        rows.append(cells)
    return table(("type", "entropy coder", "codes of 4 bits", "3 bits", "2 bits"), rows)


class Form:
    """A model with experts in one form, and what was measured of it: one entry a turn."""

    def __init__(self, folder: Path, cache: str, args: argparse.Namespace) -> None:
        model, _ = greenroom.load(str(folder), cache=cache, pressure="off", threads=args.threads)
        self.passes, self.prompt, self.context = Passes(model), args.prompt, args.context
        self.tokens_per_s: list[float] = []
        self.cpu_s: list[float] = []
        self.prompt_rates: list[float] = []
        self.read_bytes = 0
        fill(self.passes, args.fill)

    def compute_prompt(self) -> None:
        """Compute a prompt, and another one after which tokens are decoded."""
        self.prompt_rates.append(self.prompt / self.passes.prefill(self.prompt))
        self.passes.prefill(self.context)

    def decode(self, tokens: int) -> None:
        before, cpu = counters(self.passes.model)["bytes_read"], time.process_time()
        seconds = self.passes.decode(tokens)
        self.cpu_s.append((time.process_time() - cpu) / tokens)
        self.tokens_per_s.append(tokens / sum(seconds))
        self.read_bytes += counters(self.passes.model)["bytes_read"] - before

    def detach(self) -> None:
        self.passes.model.greenroom.detach()


@torch.inference_mode()
def row_of(share: float, folders: tuple[Path, Path], nbytes: int, args: Any) -> list[str]:
    """Measure both forms with slots for a share of the bytes of all experts in bfloat16."""
    cache = "100%" if share >= 100 else str(int(nbytes * share / 100))
    forms = [Form(folder, cache, args) for folder in folders]
    for number in range(args.rounds):
        for form in forms if number % 2 == 0 else forms[::-1]:
            form.compute_prompt()
        for block in range(max(1, args.tokens // BLOCK)):
            for form in forms if block % 2 == 0 else forms[::-1]:
                form.decode(min(BLOCK, args.tokens))
        note(f"{share:g} %: round {number + 1} of {args.rounds}")
    cells = [f"{share:g} %"]
    for name, scale in (("tokens_per_s", 1), ("prompt_rates", 1), ("cpu_s", 1e3)):
        values = [getattr(form, name) for form in forms]
        cells += [f"{scale * np.median(each):.1f}" for each in values]
        upper, lower = values if name == "cpu_s" else values[::-1]
        cells.append(show_ratio(list(zip(upper, lower, strict=True))))
    for form in forms:
        decoded = len(form.cpu_s) * min(BLOCK, args.tokens)
        cells.append(f"{form.read_bytes / decoded / 1e6:.1f}")
        form.detach()
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder of safetensors in bfloat16")
    parser.add_argument("--pack", type=Path, help="its pack in bf12 (default: MODEL-bf12)")
    parser.add_argument("--shares", type=float, nargs="+", default=[100, 75, 50, 25], metavar="N")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--prompt", type=int, default=128, metavar="N")
    parser.add_argument(
        "--context", type=int, default=32, metavar="N", help="tokens before decoding"
    )
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="in a round")
    parser.add_argument("--fill", type=int, default=3, metavar="N", help="prompts of 512 tokens")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--exponents", action="store_true", help="only the table of exponents")
    parser.add_argument("--types", action="store_true", help="only the table of types")
    args = parser.parse_args()
    if args.types:
        print(f"commit {commit()}\n\n{args.model}\n\n{types(args.model)}")
        return
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
