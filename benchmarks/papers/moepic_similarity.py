"""MoEpic's figures 6 and 2c: similarity of hidden states, and accuracy of the next gate, by layer.

    python benchmarks/papers/moepic_similarity.py --trace FILE

Figure 6 is the cosine similarity of the inputs of two adjacent layers' gates (h of the paper's
equation 1) for one token. Figure 2c is the number of a token's experts that the next layer's gate
names when it reads this layer's input. Layer 0 is compared with the last layer of the token before,
from which MoEpic predicts it. Means over decoded tokens.

The routing recordings have no hidden states. FILE is a trace of the demo model, or of another one,
by `greenroom trace record --gate-inputs 1 --predict next-gate` (`make papers-demo` records one).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from common import figure, options, percent, save, table

from greenroom.trace import Trace, load


def similarity(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of a layer's gate input with that of the layer before it, of decoded tokens.

    Returns those of layer 0 with the last layer of the token before, [tokens], and those of the
    other layers, [tokens, layers - 1].
    """
    if (sample := trace.gate_inputs) is None:
        sys.exit("the trace has no gate inputs: record it with --gate-inputs 1")
    decoded = np.repeat(~trace.pass_prefill, np.diff(trace.pass_starts))[sample.tokens]
    unit = sample.values / np.linalg.norm(sample.values, axis=2, keepdims=True)
    follows = np.diff(sample.tokens) == 1  # a decoded token is never the first of its request
    first = (unit[:-1, -1] * unit[1:, 0]).sum(axis=1)[follows & decoded[1:]]
    return first, (unit[decoded, :-1] * unit[decoded, 1:]).sum(axis=2)


def correct(trace: Trace) -> np.ndarray:
    """Experts of a decoded token among the top-k that the next gate named, by layer: means."""
    if "next-gate" not in trace.predictions:
        sys.exit("the trace has no predictions of the gates: record it with --predict next-gate")
    decoded = np.repeat(~trace.pass_prefill, np.diff(trace.pass_starts))
    named = trace.predictions["next-gate"].experts[decoded, :, : trace.top_k]
    used = trace.experts[decoded]
    found: np.ndarray = (used[..., :, None] == named[..., None, :]).any(axis=3).sum(axis=2)
    return found.mean(axis=0)


def main(args: argparse.Namespace) -> None:
    trace = load(args.trace)
    (first, cosines), right = similarity(trace), correct(trace)
    low, high = np.quantile(cosines, (0.1, 0.9), axis=0)
    mean, layers = cosines.mean(axis=0), np.arange(1, trace.layers)
    fig, panels = figure(1, 2, 7.6, 2.8)
    left, beside = panels[0]
    left.fill_between(layers, low, high, color="#0072b2", alpha=0.2, linewidth=0)
    left.plot(layers, mean, "o-", ms=3.5, color="#0072b2")
    left.set(title="Figure 6", xlabel="layer", ylabel="cosine with the layer before", ylim=(0, 1))
    beside.plot(range(trace.layers), right, "o-", ms=3.5, color="#d55e00")
    beside.set(title="Figure 2c", xlabel="layer", ylim=(0, trace.top_k),
               ylabel=f"of {trace.top_k} experts predicted")  # fmt: skip
    for axes in panels[0]:
        axes.set_xlim(-0.3, trace.layers - 0.7)
    save(fig, args, "moepic-similarity")
    shown = [f"{first.mean():.2f}" if first.size else "-", *(f"{value:.2f}" for value in mean)]
    rows = [
        [layer, cosine, f"{right[layer]:.2f}", percent(right[layer] / trace.top_k)]
        for layer, cosine in enumerate(shown)
    ]
    header = ["layer", "cosine", f"predicted of {trace.top_k}", "accuracy"]
    table(args, "moepic-similarity", header, rows)


if __name__ == "__main__":
    parser = options(__doc__, traces=False)
    parser.add_argument("--trace", type=Path, metavar="FILE", required=True)
    main(parser.parse_args())
