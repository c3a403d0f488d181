"""Predictors that read a layer's input before its attention, on the demo model.

    python benchmarks/papers/pre_attention.py

What enters a layer is what its router reads, without the layer's own attention. It is known when
the layer before has been computed, so a prefetch gains the time of the attention alone, but in
layer 0 the token's own embedding predicts. Two predictors read it, and write the layer's experts:

    router   the layer's own router, after the norm of the router's input (as next-gate)
    trained  a network for each layer, trained as `learned` on the earlier requests

The demo model computes the recorded requests once more, in transformers, for the inputs. Machine,
requests, cache and columns are those of saved_stalls.py; policy and predictors know nothing of
earlier requests but what networks were trained on. `learned:1, then` replays the networks of
promoe_train.py a layer ahead, and corrects them before the layer's attention.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import options, table
from promoe_bench import Bench, Demo, add_demo, demo_of
from promoe_train import forecasts
from safetensors.numpy import save_file
from saved_stalls import QUARTERS, Case, bounds, by_quarter, percent

from greenroom.config import TrainConfig
from greenroom.core.predictor import LayerPrediction, LayerRouting, PassStart
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.ranking import top
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.recording.training import train
from greenroom.sim import event_driven
from greenroom.sim.clock import Clock, TraceStep
from greenroom.trace import Trace
from greenroom.trace.trace import GateInputs, Prediction

LAYER_AHEAD = "learned:1, then "


class EarlyClock(Clock):
    """A simulated machine that predicts a layer's experts once more, before its attention."""

    def run(self, step: TraceStep) -> None:
        assert self.foresight is not None
        predictor = self.foresight.predictor
        assert isinstance(predictor, TwoTimes)
        predictor.early = True
        for event in self.foresight.predict(step.layer - 1):
            self._handle(event)
        predictor.early = False
        super().run(step)


class TwoTimes:
    """Predictor that replays predictions of two times: a layer ahead, and before attention.

    ahead: predictions of layers from 1 on, made in the layer before, or None
    early: those made before attention are asked for
    """

    name, costly, distance, early = "two-times", False, 1, False

    def __init__(self, trace: Trace, ahead: Prediction | None, before: Prediction) -> None:
        self._ahead, self._before, self._layers = ahead, before, trace.layers
        self._pass: PassStart
        self.width = before.experts.shape[2]

    def begin(self, at: PassStart) -> None:
        self._pass = at

    def observe(self, routing: LayerRouting) -> None:
        pass

    def predict(self, layer: int) -> list[LayerPrediction]:
        made = self._before if self.early else self._ahead if layer >= 0 else None
        if made is None or layer + 1 >= self._layers:
            return []
        first, end = self._pass.first, self._pass.first + self._pass.tokens
        return [LayerPrediction(layer + 1, made.experts[first:end, layer + 1].astype(np.int64))]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        assert not state


def layer_inputs(model: Any, trace: Trace) -> np.ndarray:
    """What enters each layer, after the norm of its router's input: [tokens, layers, hidden]."""
    assert trace.token_ids is not None
    layers, found = model.model.layers, list[np.ndarray]()
    taken: dict[int, torch.Tensor] = {}

    def take(number: int, module: Any, given: tuple[torch.Tensor, ...]) -> None:
        taken[number] = module.post_attention_layernorm(given[0])

    hooks = [layer.register_forward_pre_hook(partial(take, i)) for i, layer in enumerate(layers)]
    for begin, end in zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True):
        with torch.no_grad():
            model(torch.tensor(trace.token_ids[begin:end].astype(np.int64))[None])
        found.append(torch.stack([taken[i][0] for i in range(len(layers))], 1).float().numpy())
    for hook in hooks:
        hook.remove()
    return np.concatenate(found)


def with_inputs(trace: Trace, inputs: np.ndarray) -> Trace:
    """The trace with a layer more in front: layer l's input is that of layer l + 1's `learned`."""
    experts = np.concatenate([trace.experts[:, :1], trace.experts], axis=1)
    values = np.concatenate([inputs, inputs[:, -1:]], axis=1)
    per_layer = trace.experts_per_layer
    return replace(
        trace, experts=experts, experts_per_layer=np.concatenate([per_layer[:1], per_layer]),
        predictions={}, gate_inputs=GateInputs(np.arange(trace.tokens), values),
    )  # fmt: skip


def by_router(model: Any, inputs: np.ndarray, width: int) -> Prediction:
    """What each layer's own router would choose."""
    ranked = [
        top(inputs[:, i] @ layer.mlp.gate.weight.detach().float().numpy().T, width)
        for i, layer in enumerate(model.model.layers)
    ]
    return Prediction(np.stack(ranked, 1), 1)


def by_training(args: argparse.Namespace, earlier: Trace, later: Trace) -> Prediction:
    """What networks predict that were trained on other requests."""
    settings = TrainConfig(hidden=16, epochs=1) if args.quick else TrainConfig(hidden=512)
    made = train(earlier, settings, torch.device("cpu"))
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "pre-attention.predictor"
    save_file({k: np.ascontiguousarray(v) for k, v in made.tensors.items()}, file)
    predicted = forecasts(later, np.arange(later.requests), file)
    file.unlink()
    return Prediction(predicted.experts[:, 1:], 1)


def stall(case: Case, ahead: Prediction | None, before: Prediction) -> float:
    """Simulate predictions before attention, and those a layer ahead, if any."""
    foresight = Foresight(TwoTimes(case.trace, ahead, before), case.trace.offsets.tolist())
    with (
        patch.object(event_driven, "Clock", EarlyClock),
        patch.object(event_driven, "_foresight", lambda *_: foresight),
    ):
        return case.stall("oracle")


def main(args: argparse.Namespace) -> None:
    demo: Demo = demo_of(args)
    trace, model = demo.timed[1], load_reference_model(ModelSkeleton.of(find_checkpoint("demo")))
    case = Case("demo", trace, Bench(demo, "transformers").costs(1.0),
                int(args.share * demo.earlier.offsets[-1]))  # fmt: skip
    inputs, learned = layer_inputs(model, trace), trace.predictions["learned"]
    earlier = demo.earlier.select(np.arange(4)) if args.quick else demo.earlier
    predictions = {
        "router": by_router(model, inputs, learned.experts.shape[2]),
        "trained": by_training(
            args, with_inputs(earlier, layer_inputs(model, earlier)), with_inputs(trace, inputs)
        ),
    }
    without, best = bounds(case)
    rows = [["off", *["-"] * (QUARTERS + 1), f"{without:.3f}", percent(0.0)],
            ["oracle", *["-"] * (QUARTERS + 1), f"{best:.3f}", percent(1.0)]]  # fmt: skip
    ahead = [(each, None, made) for each, made in predictions.items()]
    corrected = [(LAYER_AHEAD + each, learned, made) for each, made in predictions.items()]
    for name, first, made in ahead + corrected:
        seconds = stall(case, first, made)
        saved = (without - seconds) / (without - best) if best < without else 0.0
        rows.append([name, *by_quarter(trace, made.experts), f"{seconds:.3f}", percent(saved)])
    quarters = ["accuracy", "first quarter", "second", "third", "last"]
    table(args, "pre-attention", ["predictor", *quarters, "stalls, s", "saved, of the oracle's"],
          rows)  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__, traces=False)
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in the cache")
    add_demo(parser)
    main(parser.parse_args())
