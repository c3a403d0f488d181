"""MoE-Infinity, section 4.6: are the first layers predicted worse than later ones?

Accuracy of `eamc:1` by layer: the share of the experts used that are among the top-k predicted one
layer ahead (layer 0: in the token before). Requests of all kinds in a drawn order, the first 40
tokens of each (--limit tokens in all), each token a pass; the second half of the requests counts.
`iteration` matches this pass's EAM, as in figure 5, `request` that of the request so far. `uneven`
has the most used quarter's share of a layer's uses over all requests (even: 25 %): where it is
high, a layer is easy to predict, whatever matches.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import BY_MODEL, MODELS, figure, heads, limit, options, percent, recordings, save, table
from expert_reuse import quarter
from prediction import replay, shape_of

from greenroom.predictors import PredictorSetup, predictor
from greenroom.trace import Trace
from greenroom.trace.groups import activation_matrices

TOKENS = 40  # of each request


def accuracy(trace: Trace, matching: str) -> np.ndarray:
    """[layers] accuracy of the second half of the requests."""
    shape = shape_of(trace)
    chosen = predictor(f"eamc:1,matching={matching}").build(PredictorSetup(shape))
    since = int(trace.request_starts[trace.requests // 2])
    expected = replay(chosen, trace, shape)[since:, :, : trace.top_k, None]
    used = trace.experts[since:, :, None].astype(np.int64)
    return (expected == used).any(axis=2).mean(axis=(0, 2))


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(1, 2, 7.6, 3.0, sharey=True)
    rows = []
    for model, recording in recordings(args).items():
        drawn = np.random.default_rng(args.seed).permutation(recording.requests)
        trace = heads(recording, TOKENS, drawn[: max(limit(args) // TOKENS, 2)])
        merged = activation_matrices(trace).sum(axis=0).reshape(trace.layers, -1)
        uneven = np.array([quarter(layer) for layer in merged])
        parts = np.array_split(np.arange(1, trace.layers), 3)
        for axes, matching in zip(panels[0], ("iteration", "request"), strict=True):
            right = accuracy(trace, matching)
            axes.plot(right, "o-", ms=3, color=BY_MODEL[model], label=MODELS[model])
            axes.set(title=f"by {matching}", xlabel="layer")
            thirds = [percent(float(right[part].mean())) for part in parts]
            rows.append([MODELS[model], matching, *map(percent, right[:3]), *thirds,
                         f"{np.corrcoef(right[1:], uneven[1:])[0, 1]:.2f}"])  # fmt: skip
    panels[0, 0].set_ylabel("accuracy")
    panels[0, 0].legend(fontsize=7.5)
    save(fig, args, "eamc-layers")
    table(args, "eamc-layers",
          ["recording", "matching", "layer 0", "1", "2", "first third", "second", "last",
           "correlation with uneven"], rows)  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(limit=6000, models=["olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite"])
    main(parser.parse_args())
