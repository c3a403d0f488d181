"""Cost of predictors from hidden states, in microseconds a layer of a one-token pass.

    python benchmarks/probes.py                      # a real model's sizes, random weights
    python benchmarks/probes.py --layers 8 --experts 32 --top-k 4 --hidden 160

`inputs` is a hook on the router and the copy to NumPy; `warm` is observe and predict in a loop,
`cold` the same after 32 MiB of other bytes were read, as the experts of a layer are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.predictor import LayerRouting, PassStart, Predictor, Shape
from greenroom.predictors import PredictorSetup, predictor
from greenroom.runtime.probes import GateInputProbe, Router, RouterGates
from greenroom.runtime.recording.training import hidden_size

JUNK = np.ones(32 << 20, np.uint8)


class Gate(nn.Module):
    """The common router: softmax of one matrix."""

    def __init__(self, experts: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden, dtype=torch.bfloat16) / 50)
        self.top_k = top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states @ self.weight.T
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        return logits, weights, ids


def networks(shape: Shape, hidden: int, width: int) -> dict[str, np.ndarray]:
    """Random tensors of a learned predictor."""
    random, built_predictor = np.random.default_rng(0), {"distance": np.array([1])}
    for layer, experts in enumerate(shape.experts_per_layer):
        sizes = {"up.weight": (width, hidden), "up.bias": (width,)}
        sizes |= {"down.weight": (experts, width), "down.bias": (experts,)}
        built_predictor |= {
            f"{layer}.{n}": random.standard_normal(s).astype("f") for n, s in sizes.items()
        }
    return built_predictor


def median(call: Callable[[], object], rounds: int, layers: int, cold: bool) -> float:
    """Median microseconds a layer of a call that computes all layers."""
    times = []
    for _ in range(rounds):
        if cold:
            JUNK.sum()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) / layers * 1e6


def one_pass(built_predictor: Predictor, observed: list[LayerRouting]) -> None:
    built_predictor.begin(PassStart(0, 0, 1, False))
    for each in observed:
        built_predictor.observe(each)
        built_predictor.predict(each.layer)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 16), ("experts", 64), ("top-k", 8), ("hidden", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape((args.experts,) * args.layers, args.top_k)
    gates = [Gate(args.experts, args.hidden, args.top_k) for _ in range(args.layers)]
    routers = [Router(gate, nn.Module(), args.experts) for gate in gates]
    router_gates = RouterGates(routers)
    x = torch.randn(1, args.hidden, dtype=torch.bfloat16)
    plain = median(lambda: [gate(x) for gate in gates], 200, args.layers, False)
    probe = GateInputProbe(routers)
    hook_seconds = median(
        lambda: [(gate(x), probe.take_array(i)) for i, gate in enumerate(gates)],
        200,
        args.layers,
        False,
    )
    probe.detach()
    print(f"inputs           {hook_seconds - plain:8.1f}  (the router itself {plain:.1f})")
    ids, inputs = np.arange(args.top_k)[None], x.float().numpy()
    observed = [LayerRouting(layer, ids, None, inputs) for layer in range(args.layers)]
    built_predictor: dict[str, Predictor] = {
        "next-gate": predictor("next-gate").build(PredictorSetup(shape, gates=router_gates))
    }
    for width in (128, hidden_size(args.hidden, args.experts)):  # the latter: the paper's size
        tensors = networks(shape, args.hidden, width)
        built_predictor[f"learned, {width}"] = predictor("learned").build(
            PredictorSetup(shape, tensors=tensors)
        )
    built_predictor["markov"] = predictor("markov").build(PredictorSetup(shape))
    print("                     warm     cold")
    for name, it in built_predictor.items():
        one_pass(it, observed)
        times = [median(lambda it=it: one_pass(it, observed), 60, args.layers, c) for c in (0, 1)]
        print(f"{name:<16} {times[0]:8.1f} {times[1]:8.1f}")


if __name__ == "__main__":
    main()
