"""Published speeds of other engines beside what `greenroom doctor --gpu` predicts there.

    python benchmarks/published.py [--rows N ...] [--quick]

published.json has each figure with its address, and what its author left out and is assumed here.
Nothing is measured. Sizes of models are those of shape_table.py with the file's bits a weight, or
named in published.json; dense weights are bfloat16, as Greenroom has them on a GPU.

    published       tokens/s of one request after its first token
    Greenroom       predicted tokens/s: misses moved to the card, or shared with the host
                    (--co-compute auto), whichever is faster; and the predicted range
    ratio           Greenroom / published
    without Python  the same without the time that Python takes for layers and experts
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import table
from shape_table import FAMILIES, SHAPES, entries

from greenroom.core.cost import Link
from greenroom.errors import BudgetError
from greenroom.hf.memory.budget import AUTO_SHARE
from greenroom.plan.cards.machine import HOST_SHARE, Host, predict_machine
from greenroom.plan.cards.predict import Prediction, predict
from greenroom.plan.cards.table import find_card
from greenroom.plan.costs import machine_costs
from greenroom.plan.model import Model
from greenroom.plan.workload import synthetic_workload

DATA = Path(__file__).with_name("published.json")
DENSE_BITS = 16
OVERHEAD, KV = 600 << 20, 100 << 20  # bytes on the card besides weights: libraries, buffers; KV
CONTEXT = 4096
# Families whose tokens are one graph if all experts have slots, else one for each layer.
GRAPHS = {"qwen3moe", "mixtral", "gpt-oss", "deepseek2", "glm4moe"}
DISK = Link(3e9, 1e-4, 4)


def sizes_of(row: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a row's model, in weights."""
    if "sizes" in row:
        return named[row["sizes"]]
    shape = SHAPES[row["shape"]]
    config, weights = shape.config, {"expert": 0, "dense": 0, "embedding": 0}
    for entry in entries(shape, config):
        count = 1
        for size in entry.shape:
            count *= size
        if entry.gguf and entry.experts:
            weights["expert"] += count if entry.role != "bias" else 0
        elif not entry.experts:
            weights["dense"] += count
            weights["embedding"] += count * (entry.role == "embedding")
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    return {
        "layers": layers,
        "experts": config[FAMILIES[shape.family].experts],
        "top_k": config["num_experts_per_tok"],
        "expert_weights": weights["expert"] // layers,
        "dense_weights": weights["dense"],
        "embedding_weights": weights["embedding"],
    }


def model_of(row: dict[str, Any], named: dict[str, Any]) -> Model:
    """A row's model, as the planner describes one."""
    sizes = sizes_of(row, named)
    expert = int(sizes["expert_weights"] * row["bits"] / 8)
    dense, embedding = (
        sizes[f"{part}_weights"] * DENSE_BITS // 8 for part in ("dense", "embedding")
    )
    return Model(
        name=row["model"], fingerprint="", experts_per_layer=(sizes["experts"],) * sizes["layers"],
        top_k=sizes["top_k"], expert_bytes=expert, slot_bytes=expert, dense_bytes=dense,
        read_bytes=dense - embedding, overhead_bytes=OVERHEAD, kv_bytes=KV, context=CONTEXT,
        token_graph="shape" in row and SHAPES[row["shape"]].family in GRAPHS,
    )  # fmt: skip


def predictions(row: dict[str, Any], model: Model, bracket: bool) -> tuple[Prediction, Prediction]:
    """What is predicted for a row's machine, and without the time that Python takes."""
    card = find_card(row["card"])
    rate = row["host_gbs"] * 1e9 * (1 if row.get("host_measured") else HOST_SHARE)
    memory = row["memory_gib"] << 30
    machine = predict_machine(card, Host(memory, rate, DISK))
    cpu, gpu = machine.processors
    numbers = "layer", "fetch", "miss", "graph_token", "piece_layer", "shared_miss"
    bare = replace(gpu, **dict.fromkeys(numbers, 0.0))
    bare = replace(machine, processors=(cpu, bare))
    workload, budgets = synthetic_workload(model), (AUTO_SHARE * card.memory, AUTO_SHARE * memory)
    with_python, without = (
        predict(model, machine_costs(each, model, processor="gpu"), workload,
                *map(int, budgets), bracket=bracket and each is machine)
        for each in (machine, bare)
    )  # fmt: skip
    return with_python, without


def cells(row: dict[str, Any], model: Model, bracket: bool) -> tuple[str, ...]:
    """A row of the table."""
    first = (row["engine"], row["model"], row["card"], f"{row['host_gbs']:g}",
             f"{row['tokens_s']:g}")  # fmt: skip
    try:
        ours, bare = predictions(row, model, bracket)
    except BudgetError:
        need, has = (n / 2**30 for n in (model.least_memory,
                                         AUTO_SHARE * find_card(row["card"]).memory))  # fmt: skip
        return (*first, f"does not fit: {need:.0f} GiB of {has:.0f}", "-", "-", "-", "-")
    best, alone = (
        min((e for e in (each.moved, each.shared) if e), key=lambda e: e.tpot)
        for each in (ours, bare)
    )
    how = "graph" if ours.graph else "shared" if best is ours.shared else "moved"
    how = "resident" if ours.fits and not ours.graph else how
    published = row["tokens_s"]
    return (
        *first, f"{1 / best.tpot:.3g}", f"{1 / best.high:.3g} to {1 / best.low:.3g}",
        f"{1 / best.tpot / published:.2f}", f"{1 / alone.tpot:.3g}", how,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows, from 1")
    parser.add_argument("--quick", action="store_true", help="one workload: a narrower range")
    args = parser.parse_args()
    data = json.loads(DATA.read_text())
    rows = [r for n, r in enumerate(data["rows"], 1) if not args.rows or n in args.rows]
    print(table(
        ["engine", "model", "card", "host GB/s", "published", "Greenroom", "range", "ratio",
         "without Python", "misses"],
        [cells(row, model_of(row, data["sizes"]), not args.quick) for row in rows],
    ))  # fmt: skip
    for row in rows:
        assumed = row.get("assumed") and f"assumed: {row['assumed']}"
        notes = [row["source"], row.get("stated"), assumed]
        print(f"- {row['engine']}, {row['model']}, {row['card']}: {'; '.join(filter(None, notes))}")


if __name__ == "__main__":
    main()
