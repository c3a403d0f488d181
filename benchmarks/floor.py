"""Measure the floor of this machine: a lower bound for the time of every engine.

    python benchmarks/floor.py bench-data/moe1.7b-zipf1.0

- RAM: bytes a second that threads read from memory (best of several passes over 512 MiB, by a
  compiled loop that sums: one add for eight bytes).
- Disk: random reads of one expert's size from the checkpoint's files, past the page cache
  (O_DIRECT) and through it (cold: the files are dropped first), with 1, 2 and 4 threads.
- A token: bytes of dense weights and of top-k experts that one decode pass must read, from the
  checkpoint's headers. Divided by RAM's bandwidth, the time of a pass with everything resident;
  plus missing bytes over the disk's bandwidth, the time of a pass with misses. Nothing overlaps
  in this floor, so an engine that overlaps perfectly can come out a little above 100 %.

About 15 seconds and 10 GB of reads. Prints one line of JSON, and a table with --table.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import machine, table

from greenroom.runtime.measure.bandwidth import disk_bandwidth, ram_bandwidth


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one decode pass of one token must read from memory."""

    dense: int
    experts: int
    expert: int  # one expert of one layer

    @property
    def total(self) -> int:
        return self.dense + self.experts


def token_bytes(folder: Path) -> TokenBytes:
    """Compute the bytes of one decode pass from a checkpoint's headers.

    They are all dense weights without the embedding (of which a pass reads one row), and top-k
    experts of every layer.
    """
    config = json.loads((folder / "config.json").read_text())
    dense = experts = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            if ".experts." in name:
                experts += size
            elif not name.endswith("embed_tokens.weight"):
                dense += size
    n, top_k = config["num_experts"], config["num_experts_per_tok"]
    return TokenBytes(dense, experts * top_k // n, experts // (n * config["num_hidden_layers"]))


def floor(folder: Path, threads: int = 2) -> dict[str, Any]:
    """Measure bandwidths in bytes a second; `disk` is the best O_DIRECT case."""
    need = token_bytes(folder)
    files = sorted(folder.glob("*.safetensors"))
    ram = ram_bandwidth(threads)
    direct = {n: disk_bandwidth(files, need.expert, n, True) for n in (1, 2, 4)}
    buffered = {n: disk_bandwidth(files, need.expert, n, False) for n in (1, 2, 4)}
    return {
        "ram": ram,
        "ram_threads": threads,
        "direct": direct,
        "buffered": buffered,
        "disk": max(direct.values()),
        "token": {**asdict(need), "total": need.total},
        "resident_s": need.total / ram,
    }


def pass_seconds(measured: dict[str, Any], missing_bytes: float) -> float:
    """Seconds of a decode pass at the floor, with `missing_bytes` of experts read from disk."""
    return float(measured["resident_s"] + missing_bytes / measured["disk"])


def show(measured: dict[str, Any]) -> str:
    need = measured["token"]
    rows = [(f"RAM read, {measured['ram_threads']} threads", f"{measured['ram'] / 1e9:.1f} GB/s")]
    for kind in ("direct", "buffered"):
        name = "O_DIRECT" if kind == "direct" else "buffered, cold"
        for threads, rate in measured[kind].items():
            rows.append((f"disk, {name}, {threads} threads", f"{rate / 1e9:.2f} GB/s"))
    rows.append(("dense weights a token", f"{need['dense'] / 1e6:.0f} MB"))
    rows.append(("experts a token", f"{need['experts'] / 1e6:.0f} MB"))
    resident = measured["resident_s"]
    rows.append(("all resident, floor", f"{resident * 1e3:.1f} ms, {1 / resident:.1f} tokens/s"))
    worst = pass_seconds(measured, need["experts"])
    rows.append(("every expert missing, floor", f"{worst * 1e3:.0f} ms, {1 / worst:.1f} tokens/s"))
    return table(("floor", "measured"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure this machine's floor")
    parser.add_argument("folder", type=Path, help="a checkpoint (config.json, *.safetensors)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    measured = floor(args.folder, args.threads)
    if args.table:
        print(machine(), show(measured), sep="\n\n")
    else:
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
