"""The demo model's recordings and trained predictors, from which ProMoE's figures are made.

    python benchmarks/papers/promoe_train.py --out benchmarks/papers/demo

The demo model continues 84 prompts. A predictor is trained for each distance on four fifths of the
requests (`greenroom train-predictor`), and predicts the others from their recorded gate inputs, as
a run does. `--out` gets

    kN.predictor    the networks that predict N layers ahead
    kN.trace        the held-out requests: routing, token ids, and what `learned` and `next-gate`
                    predicted N layers ahead
    earlier.trace   the requests of the training, for what else learns from earlier ones

The files are in the repository, because the demo model's answers, and so the figures, may differ
between machines in their last bits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from greenroom.core.predictor import LayerRouting, PassStart, Shape
from greenroom.predictors import PredictorSetup, predictor
from greenroom.runtime.recording.forecasts import ForecastRecorder
from greenroom.trace import Trace, load, save
from greenroom.trace.trace import Prediction

DISTANCES = (1, 2, 4)
SUBJECTS = [
    "lighthouse",
    "railway",
    "bread",
    "garden",
    "ship",
    "winter",
    "bridge",
    "teacher",
    "river",
    "music",
    "market",
    "clock",
]
FORMS = (
    "Once upon a time there was a {}",
    "The history of the {}",
    "def count_{}(items):",
    "Question: what is a {}?",
    "A letter about the {}",
    "In the year 1850 the {}",
    "How to build a {}:",
)
HELD_OUT, SEED = 0.2, 0  # the defaults of train-predictor


def greenroom(*args: object) -> None:
    """Run a command of Greenroom without what earlier runs have learned."""
    environment = {**os.environ, "GREENROOM_LEARNED": "off", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "greenroom", *map(str, args)], check=True, env=environment
    )


def record(folder: Path, quick: bool) -> Path:
    """Record the demo model's answers, with the inputs of its gates."""
    prompts = [form.format(each) for each in SUBJECTS for form in FORMS]
    if quick:
        prompts = prompts[::14]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    trace = folder / "run.trace"
    greenroom(
        "trace", "record", "demo", "--prompts", folder / "prompts.txt", "-o", trace,
        "--max-new-tokens", 48 if quick else 160, "--cache", "100%", "--gate-inputs", 1,
        "--token-ids", "--temperature", 0.8, "--seed", 7,
        "--predict", "next-gate,next-gate:2,next-gate:4",
    )  # fmt: skip
    return trace


def train(trace: Path, file: Path, distance: int, quick: bool) -> None:
    """Train the predictor of a distance; its hidden size keeps the three files below 10 MB."""
    greenroom(
        "train-predictor", "demo", "--trace", trace, "-o", file, "--distance", distance,
        "--hidden", 16 if quick else 512, "--epochs", 1 if quick else 20,
        "--held-out", HELD_OUT, "--seed", SEED,
    )  # fmt: skip


def halves(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Requests that `train-predictor` trains on, and those that it holds out."""
    order = np.random.default_rng(SEED).permutation(trace.requests)
    number = min(trace.requests - 1, max(1, round(HELD_OUT * trace.requests)))
    return np.sort(order[number:]), np.sort(order[:number])


def forecasts(trace: Trace, requests: np.ndarray, file: Path) -> Prediction:
    """What a trained predictor predicts for some requests, from their recorded gate inputs."""
    shape = Shape(tuple(trace.experts_per_layer.tolist()), trace.top_k)
    learned = predictor("learned").build(PredictorSetup(shape, tensors=load_file(file)))
    recorder, predicted = ForecastRecorder({"learned": learned}, shape), []
    assert trace.gate_inputs is not None
    assert len(trace.gate_inputs.tokens) == trace.tokens
    values = trace.gate_inputs.values
    for request in requests.tolist():
        for number in range(*trace.first_passes[request : request + 2].tolist()):
            begin, end = trace.pass_starts[number : number + 2].tolist()
            prefill = bool(trace.pass_prefill[number])
            recorder.begin(PassStart(request, begin, end - begin, prefill, None))
            for layer in range(trace.layers):
                chosen = trace.experts[begin:end, layer].astype(np.int64)
                inputs = np.asarray(values[begin:end, layer], np.float32)
                recorder.layer(LayerRouting(layer, chosen, inputs=inputs))
            predicted.append(recorder.end()["learned"])
    assert learned.distance is not None
    kind = trace.experts.dtype
    return Prediction(np.concatenate(predicted).astype(kind), learned.distance)


def main(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.trace or record(args.work, args.quick)
    trace = load(path)
    trained, held_out = halves(trace)
    bare = replace(trace, gate_inputs=None, predictions={})
    save(bare.select(trained), args.out / "earlier.trace")
    for distance in DISTANCES:
        file = args.out / f"k{distance}.predictor"
        train(path, file, distance, args.quick)
        gate = next(each for each in trace.predictions.values() if each.distance == distance)
        timed = replace(bare, predictions={"next-gate": gate}).select(held_out)
        predictions = {**timed.predictions, "learned": forecasts(trace, held_out, file)}
        save(replace(timed, predictions=predictions), args.out / f"k{distance}.trace")
    print(f"{args.out}: {trained.size} requests for the training, {held_out.size} held out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/papers/demo"), metavar="DIR",
        help="where the files go (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=Path("bench-data/papers/demo"), metavar="DIR",
        help="where the whole recording goes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="an earlier recording, instead of a new one")
    parser.add_argument("--quick", action="store_true", help="six prompts, smaller networks")
    main(parser.parse_args())
