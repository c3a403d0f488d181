"""Accuracy of a model's predictors by distance and layer, for the noisy oracle of replays.

    python benchmarks/accuracy.py demo --out src/greenroom/predictors/helpers/accuracy.json

The model answers one set of prompts, on which `learned` is trained for each distance, and then
another set, whose predictions are recorded (`greenroom trace record --predict`). A figure is the
share of the experts used by decoded tokens that were among as many likeliest predicted ones. A
token's first `distance` layers are predicted in the token before by next-gate, and at layer 0 by
`learned`, which does not predict layer 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import table

from greenroom.trace import Trace, load

PLACES = ("In a village by the sea", "On the top floor of an old house", "Behind the school",
          "In the last wagon of the night train", "At the edge of the forest",
          "Under the bridge", "In the kitchen of the castle", "On a small farm")  # fmt: skip
SUBJECTS = ("a clockmaker", "a girl with a red kite", "a tired postman", "two brothers", "a fox",
            "an old captain", "a baker's daughter", "a young teacher", "a quiet giant",
            "a boy who could not sleep", "a painter", "a lost dog")  # fmt: skip
HELD_OUT = 4  # every so many-th prompt is not trained on
DISTANCES = (1, 2, 4)


def greenroom(*args: object) -> None:
    """Run a command of Greenroom's; it ends the benchmark if it fails."""
    environment = {**os.environ, "GREENROOM_LEARNED": "off"}
    command = [sys.executable, "-m", "greenroom", *map(str, args)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def accuracy_of(trace: Trace, name: str) -> list[float]:
    """The accuracy of a recorded predictor for each layer, over decoded tokens."""
    decoded = np.repeat(~trace.pass_prefill, np.diff(trace.pass_starts))
    used = trace.experts[decoded][..., :, None]
    predicted = trace.predictions[name].experts[decoded][..., None, : trace.top_k]
    right = (used == predicted).any(axis=3)
    return [round(float(share), 3) for share in right.mean(axis=(0, 2))]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Record, train and record again in a folder; return the accuracies."""
    prompts = [f"{place} there lived {subject}."
               for subject, place in product(SUBJECTS, PLACES)][:: args.every]  # fmt: skip
    sets = {
        "held-out": prompts[::HELD_OUT],
        "training": [each for i, each in enumerate(prompts) if i % HELD_OUT],
    }
    for name, lines in sets.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    record = ("trace", "record", args.model, "--max-new-tokens", args.tokens, "--raw")
    training = folder / "training.npz"
    greenroom(*record, "--prompts", folder / "training.txt", "-o", training, "--gate-inputs", 1)
    found: dict[str, dict[str, list[float]]] = {"next-gate": {}, "learned": {}}
    for distance in args.distances:
        file, trace_file = folder / f"{distance}.predictor", folder / f"{distance}.trace"
        greenroom("train-predictor", args.model, "--trace", training, "-o", file,
                  "--distance", distance)  # fmt: skip
        greenroom(
            *record, "--prompts", folder / "held-out.txt", "-o", trace_file,
            "--predict", f"next-gate:{distance},learned", "--predictor", file,
        )  # fmt: skip
        trace = load(trace_file)
        for name in found:
            recorded = name if name in trace.predictions else f"{name}:{distance}"
            found[name][str(distance)] = accuracy_of(trace, recorded)
    decoded = int((~trace.pass_prefill).sum())
    return {"model": Path(args.model).name, "tokens": decoded, "accuracy": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    parser.add_argument("--every", type=int, default=1, help="take every so many-th prompt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    accuracy = result["accuracy"]
    lines = [
        f'    "{name}": {{\n'
        + ",\n".join(f'      "{d}": {json.dumps(layers)}' for d, layers in found.items())
        + "\n    }"
        for name, found in accuracy.items()
    ]
    head = "".join(f'  "{key}": {json.dumps(result[key])},\n' for key in ("model", "tokens"))
    args.out.write_text(f'{{\n{head}  "accuracy": {{\n' + ",\n".join(lines) + "\n  }\n}\n")
    rows = [
        (name, d, *(f"{share:.1%}" for share in layers))
        for name, found in accuracy.items()
        for d, layers in found.items()
    ]
    layers = range(len(accuracy["next-gate"][str(args.distances[0])]))
    print(table(("predictor", "distance", *(f"layer {i}" for i in layers)), rows))


if __name__ == "__main__":
    main()
