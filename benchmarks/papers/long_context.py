"""MoE-Infinity, figure 8: decoding latency over the length of the context, simulated.

The paper's machine and model: DeepSeek-V2-Lite, whose keys and values take 31,104 bytes a token (27
layers of 576 numbers in bfloat16), and whose experts take 17.3 MB each; a link of 24 GB/s; a token
computes for 50 ms at 2^12 tokens of context, and for 160 ms at 2^17 (in proportion in between). At
2^17 tokens 1 GB is left for experts, so at c tokens it is 1 GB + (2^17 - c) * 31,104 bytes. All
recordings get the same share of their experts, and the same times for a token and for an expert.

No recording has such a context: the routing is that of the first 40 tokens of drawn requests, one
after the other; the last quarter of --tokens is timed. So the figure shows what fewer slots and
slower tokens do, and not what a long context does to routing.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import (
    COLOURS,
    MODELS,
    experts_of,
    figure,
    heads,
    options,
    recordings,
    save,
    share_of_legend,
    table,
)

from greenroom.core.cost import Costs, Link, Work
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import Trace, stream

CONTEXTS = tuple(1 << n for n in range(12, 18))
KV_TOKEN, LEAST, LAST = 27 * 576 * 2, 10**9, 1 << 17  # bytes, bytes left at LAST tokens, tokens
EXPERT, EXPERTS, LINK = 3 * 2048 * 1408 * 2, 26 * 64, 24e9  # bytes of an expert, experts, bytes/s
COMPUTE = (0.050, 0.160)  # seconds of a token at the first and the last context
HEAD = 40  # tokens of each request
SYSTEMS = {  # name: policy, predictor, colour
    "MoE-Infinity": ("moe-infinity", "eamc", COLOURS["MoE-Infinity"]),
    "MoE-Infinity, no prefetch": ("moe-infinity", "off", COLOURS["Marking"]),
    "LRU": ("lru", "off", COLOURS["LRU"]),
    "next-use": ("next-use", "off", COLOURS["LFU"]),
}


def share(context: int) -> float:
    """Share of the experts that have a slot at a context's length."""
    return (LEAST + (LAST - context) * KV_TOKEN) / (EXPERT * EXPERTS)


def computation(context: int) -> float:
    """Seconds in which a token is computed."""
    first, last = COMPUTE
    return first + (last - first) * (context - CONTEXTS[0]) / (LAST - CONTEXTS[0])


def tpot(trace: Trace, context: int, evicts: str, prefetch: str, seed: int) -> float:
    """Mean seconds of the last quarter of the tokens."""
    rest = Work.constant(computation(context) / trace.layers)
    # Of another size than the paper's experts, in a token of another number of experts: the link
    # carries a token's experts in the same time.
    factor = 26 * 6 / (trace.layers * trace.top_k)
    costs = Costs((Link(LINK / factor, 0.0, 1),), Work.constant(1e-6), rest)
    slots = max(int(share(context) * experts_of(trace)), trace.top_k + 1)
    run = simulate_events(
        trace, stream(trace, "runtime"), slots, policy(evicts), costs, EXPERT, prefetch,
        EventOptions(chunk_bytes=EXPERT, seed=seed),
    )  # fmt: skip
    return float(np.mean(run.times.gaps[-(trace.tokens // 4) :]))


def main(args: argparse.Namespace) -> None:
    contexts = CONTEXTS[::5] if args.quick else CONTEXTS
    tokens = 160 if args.quick else args.tokens
    fig, panels = figure(1, len(args.models), 0.6 + 2.35 * len(args.models), 3.0, sharey=True)
    rows = []
    for (model, recording), axes in zip(recordings(args).items(), panels.flat, strict=True):
        drawn = np.random.default_rng(args.seed).permutation(recording.requests)
        long_enough = drawn[np.diff(recording.request_starts)[drawn] >= HEAD]
        trace = heads(recording, HEAD, long_enough[: tokens // HEAD])
        for name, (evicts, prefetch, colour) in SYSTEMS.items():
            times = [tpot(trace, c, evicts, prefetch, args.seed) for c in contexts]
            axes.plot(contexts, times, "o-", ms=3.5, color=colour, label=name)
            rows.append([MODELS[model], name, *(f"{1e3 * t:.0f}" for t in times)])
        axes.plot(contexts, [computation(c) for c in contexts], color="#888888", linewidth=0.8,
                  linestyle=":", label="computation alone")  # fmt: skip
        axes.set_title(MODELS[model], fontsize=8.5)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens of context", ylim=(0, None))
    panels[0, 0].set_ylabel("seconds a token")
    share_of_legend(fig, panels[0, 0], 3)
    save(fig, args, "long-context")
    header = [f"{c:,} ({100 * share(c):.1f} %)" for c in contexts]
    table(args, "long-context", ["recording", "system", *header], rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite"])
    parser.add_argument("--tokens", type=int, default=320, help="simulated (default: 320)")
    main(parser.parse_args())
