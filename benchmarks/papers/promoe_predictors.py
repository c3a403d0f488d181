"""ProMoE, figures 8 and 9 and section 4.1: accuracy, FETCHRATE and GOODPRED by distance.

    python benchmarks/papers/promoe_predictors.py

Accuracy by layer is that of the top-k in the held-out requests of the demo model: the trained
predictors, next-gate (the paper's skip-based method), and the experts that were used most with the
same token in the requests of the training (its token-based method). The first layer is left out:
the trained predictor names no experts for it. GOODPRED comes from simulations with --share of the
experts in an LRU cache of equal layers, and ProMoE's prefetcher. `promoe_bench.py` has the machine,
but for the link, which is faster here: with the paper's waits hardly any prefetch is in time.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import figure, options, percent, save, share_of_legend, table
from promoe_bench import DISTANCES, LAYER, Bench, Demo, add_demo, demo_of, proactive

from greenroom.trace import Trace

NAMES = {"learned": "-", "next-gate": "--"}
MARKERS = {"learned": "o", "next-gate": "s"}
LINKS = (1 / 8, 1 / 4, 1 / 2)  # time to load an expert, in layers
BY_DISTANCE = {1: "#0072b2", 2: "#009e73", 4: "#d55e00"}


def accuracies(trace: Trace, predicted: np.ndarray) -> np.ndarray:
    """[layers] share of the used experts that were among the top-k predicted."""
    top = predicted[:, :, : trace.top_k, None]
    return (top == trace.experts[:, :, None, :]).any(axis=2).mean(axis=(0, 2))


def by_token(earlier: Trace, trace: Trace) -> np.ndarray:
    """[tokens, layers, top_k] experts that earlier requests used most with the same token.

    A token that they do not have gets the experts that all of them used most.
    """
    assert earlier.token_ids is not None
    assert trace.token_ids is not None
    experts, layers = int(earlier.experts_per_layer[0]), earlier.layers
    used = np.zeros((int(max(earlier.token_ids.max(), trace.token_ids.max())) + 1, layers, experts))
    tokens = np.repeat(earlier.token_ids, layers * earlier.top_k)
    each_layer = np.tile(np.repeat(np.arange(layers), earlier.top_k), earlier.tokens)
    np.add.at(used, (tokens, each_layer, earlier.experts.reshape(-1)), 1)
    used += used.sum(axis=0) / used.sum()  # only orders experts of the same count
    best = np.argsort(-used[trace.token_ids], axis=2, kind="stable")
    return best[:, :, : trace.top_k]


def accuracy(args: argparse.Namespace, demo: Demo) -> None:
    """Figures 8 and 9: accuracy by layer and distance."""
    curves = {}
    for name in NAMES:
        for k, trace in demo.whole.items():
            curves[name, k] = accuracies(trace, trace.predictions[name].experts)
    token = accuracies(demo.whole[1], by_token(demo.earlier, demo.whole[1]))
    fig, panels = figure(1, 1, 5.6, 3.2)
    layers = range(1, len(token))
    for (name, k), values in curves.items():
        style = {"ls": NAMES[name], "color": BY_DISTANCE[k], "label": f"{name}, k = {k}"}
        panels[0, 0].plot(layers, values[1:], MARKERS[name], ms=3.5, **style)
    panels[0, 0].plot(layers, token[1:], ":", color="#4d4d4d", label="token")
    panels[0, 0].set(xlabel="layer", ylabel="accuracy", ylim=(0, 1))
    share_of_legend(fig, panels[0, 0], 4)
    save(fig, args, "promoe-predictors")
    rows = [
        [layer, *(percent(values[layer]) for values in curves.values()), percent(token[layer])]
        for layer in layers
    ]
    means = [percent(values[1:].mean()) for values in (*curves.values(), token)]
    header = ["layer", *(f"{name}, k = {k}" for name, k in curves), "token"]
    table(args, "promoe-predictors", header, [*rows, ["mean", *means]])


def goodpred(args: argparse.Namespace, demo: Demo) -> None:
    """Section 4.1: accuracy, FETCHRATE and GOODPRED, by predictor and distance."""
    rows, bench = [], Bench(demo, "transformers")
    links = LINKS[:1] if args.quick else LINKS
    for link in links:
        factor = link * LAYER / bench.transfer
        without = bench.measure(proactive("off", 1), args.share, factor)
        for name in ("next-gate", "learned", "perfect"):
            for k in DISTANCES:
                measured = bench.measure(proactive(name, k), args.share, factor)
                run = measured.run
                shares = (run.accuracy, run.fetch_rate, run.goodpred)
                rows.append([
                    f"{link:g}", name, k, *("-" if x is None else percent(x) for x in shares),
                    f"{measured.tpot * 1e3:.2f}", f"{without.tpot / measured.tpot:.2f}",
                ])  # fmt: skip
    header = ["expert / layer", "predictor", "k", "accuracy", "FETCHRATE", "GOODPRED", "TPOT ms"]
    table(args, "promoe-goodpred", [*header, "x without"], rows)


def main(args: argparse.Namespace) -> None:
    demo = demo_of(args)
    accuracy(args, demo)
    goodpred(args, demo)


if __name__ == "__main__":
    parser = options(__doc__, traces=False)
    add_demo(parser)
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in the cache")
    main(parser.parse_args())
