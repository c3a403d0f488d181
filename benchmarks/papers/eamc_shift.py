"""MoE-Infinity, table 3: how many requests until the cache has recovered from a change of load.

For every ordered pair of kinds (labels; gpt-oss: its data sets) a cache serves requests of the
first kind, then of the second. The same requests are served after others of their own kind: what a
request misses more in the first case is its excess. Recovered is the first request from which the
mean excess of five is at most 2 % of what is missed anyway. Slots for a quarter of the experts,
40 tokens of each request, natural order. `iteration` matches this pass's EAM as in algorithm 1,
`request` the counts since the request began. LRU, which has no collection, is the control.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
from common import COLOURS, MODELS, experts_of, figure, heads, options, recordings, save, table

from greenroom.policies import policy
from greenroom.sim.replay import replay
from greenroom.trace import Trace, stream

TOKENS, WINDOW, NEAR = 40, 5, 0.02
POLICIES = {
    "LRU": ("lru", COLOURS["LRU"]),
    "MoE-Infinity by request": ("moe-infinity:matching=request", COLOURS["MoE-Infinity"]),
    "MoE-Infinity by iteration": ("moe-infinity", COLOURS["Marking"]),
}


def kinds(trace: Trace, number: int) -> dict[str, np.ndarray]:
    """Requests of the commonest kinds, at most four, as indices by name.

    A kind has at least twice `number` requests.
    """
    label = np.array([text.split("/")[0] for text in trace.labels])
    common = [name for name, count in Counter(label.tolist()).most_common(4) if count >= 2 * number]
    return {name: np.flatnonzero(label == name) for name in common}


def misses(trace: Trace, chosen: np.ndarray, name: str) -> np.ndarray:
    """[requests] misses of each of these requests, served one after another."""
    cut = heads(trace, TOKENS, chosen)
    requests = stream(cut, "natural")
    done = replay(requests, cut.offsets, experts_of(cut) // 4, policy(name), detail=True)
    of = np.repeat(requests.request, np.diff(requests.starts))
    return np.bincount(of, done.missed, cut.requests)


def excess(trace: Trace, before: np.ndarray, same: np.ndarray, after: np.ndarray, name: str):
    """[requests] the share that is missed more after a change."""
    new = misses(trace, np.append(before, after), name)[len(before) :]
    old = misses(trace, np.append(same, after), name)[len(same) :]
    return (new - old) / old.mean()


def recovery(per_request: np.ndarray) -> int:
    """The first request from which the mean of WINDOW is small; all of them where none is."""
    window_means = np.convolve(per_request, np.ones(WINDOW) / WINDOW, "valid")
    small = np.flatnonzero(window_means <= NEAR)
    return int(small[0]) if small.size else len(per_request)


def main(args: argparse.Namespace) -> None:
    fig, panels = figure(1, len(args.models), 0.8 + 3.3 * len(args.models), 2.9, sharey=True)
    rows = []
    for (model, trace), axes in zip(recordings(args).items(), panels.flat, strict=True):
        number = 8 if args.quick else args.requests
        random = np.random.default_rng(args.seed)
        groups = {name: random.permutation(of) for name, of in kinds(trace, number).items()}
        for name, (base, colour) in POLICIES.items():
            per_request = np.array([
                excess(trace, groups[a][:number], groups[b][:number],
                       groups[b][number : 2 * number], base)
                for a in groups for b in groups if a != b
            ])  # fmt: skip
            took = [recovery(one) for one in per_request]
            axes.plot(per_request.mean(axis=0), color=colour, label=name)
            axes.fill_between(range(per_request.shape[1]),
                              *np.percentile(per_request, (25, 75), axis=0), color=colour,
                              alpha=0.15, linewidth=0)  # fmt: skip
            rows.append([MODELS[model], len(groups), name, f"{min(took)}-{np.mean(took):.0f}-"
                         f"{max(took)}", f"{100 * per_request[:, 0].mean():.0f} %",
                         f"{100 * per_request[:, -5:].mean():.1f} %"])  # fmt: skip
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.set(title=MODELS[model], xlabel="requests after the change")
    panels[0, 0].set_ylabel("misses more than without")
    panels[0, 0].legend()
    save(fig, args, "eamc-shift")
    table(args, "eamc-shift",
          ["recording", "kinds", "policy", "requests to recover (least-mean-most)",
           "excess of the first", "of the last five"], rows)  # fmt: skip


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b"])
    parser.add_argument("--requests", type=int, default=30, help="of each kind (default: 30)")
    main(parser.parse_args())
