"""D2MoE: transfers of a layer's missing experts by id, and hottest expert first.

`prompts`: every request is one pass. `8 answers`: passes of one token of each of 8 requests.
`8 answers, nested`: the same with copies nested in int8 experts, which serve misses with a tail
weight below 0.4 (not for recordings without gate weights). The table has the mean time of a pass.

Simulated: LRU, a quarter of the experts' memory, one link, nothing prefetched. An expert is
computed in 0.5 ms for up to 4 tokens, and in proportion to its tokens beyond that; the rest of a
layer takes 1 ms. `transfer ms` is the time in which the link carries an expert.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from common import MODELS, options, recordings, table

from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.core.cost import Costs, Link, Work
from greenroom.policies import policy
from greenroom.sim.event_driven import EventOptions, simulate_events
from greenroom.trace import Trace, stream

BYTES = 4 << 20  # of an expert: one chunk
EXPERT = Work(((1, 0.5e-3), (4, 0.5e-3), (8, 1e-3)))
ANSWERS, TRANSFERS_MS = 8, (0.5, 1, 2)
EXACT = SchedulerConfig()
NESTED = SchedulerConfig(miss_precision="int4", low_below=0.4)


def as_prompts(trace: Trace) -> Trace:
    """Every request as one pass of a prompt."""
    return replace(
        trace, pass_starts=trace.request_starts, pass_prefill=np.ones(trace.requests, np.bool_),
        gate_inputs=None, predictions={},
    )  # fmt: skip


def as_batches(trace: Trace, tokens: int) -> Trace | None:
    """Passes of one token of each of 8 requests, for the first tokens of all requests.

    None if fewer than 8 requests have so many tokens, as in Mixtral's recording.
    """
    long = np.flatnonzero(np.diff(trace.request_starts) >= tokens)
    if long.size < ANSWERS:
        return None
    groups = long[: long.size // ANSWERS * ANSWERS].reshape(-1, ANSWERS)
    starts = trace.request_starts[groups]
    rows = (starts[:, None, :] + np.arange(tokens)[:, None]).reshape(-1)
    return Trace(
        experts=trace.experts[rows],
        experts_per_layer=trace.experts_per_layer,
        request_starts=np.arange(len(groups) + 1) * tokens * ANSWERS,
        pass_starts=np.arange(0, rows.size + 1, ANSWERS),
        pass_prefill=np.zeros(rows.size // ANSWERS, np.bool_),
        labels=("",) * len(groups),
        weights=None if trace.weights is None else trace.weights[rows],
    )


def seconds(trace: Trace, transfer_ms: float, config: SchedulerConfig) -> float:
    """The mean time of a pass, in ms."""
    costs = Costs((Link(BYTES / transfer_ms * 1e3, lanes=1),), EXPERT, Work.constant(1e-3))
    run = simulate_events(
        trace, stream(trace, "runtime"), int(trace.offsets[-1]) // 4, policy("lru"), costs, BYTES,
        "off", EventOptions(config=config, nested=True),
    )  # fmt: skip
    return 1e3 * run.times.seconds / trace.passes


def main(args: argparse.Namespace) -> None:
    rows = []
    for model, recording in recordings(args).items():
        few = recording.select(np.arange(min(recording.requests, 8 if args.quick else 64)))
        batches = as_batches(few, 4 if args.quick else args.tokens)
        cases = {"prompts": (as_prompts(few), EXACT)}
        if batches is not None:
            cases[f"{ANSWERS} answers"] = (batches, EXACT)
        if batches is not None and recording.weights is not None:
            cases[f"{ANSWERS} answers, nested"] = (batches, NESTED)
        for name, (trace, config) in cases.items():
            for ms in TRANSFERS_MS:
                ids, hottest = (
                    seconds(trace, ms, replace(config, demand_order=order))
                    for order in ("id", "hottest")
                )
                rows.append([
                    MODELS[model], name, ms, f"{ids:.1f}", f"{hottest:.1f}",
                    f"{hottest / ids:.3f}",
                ])  # fmt: skip
    header = ["recording", "pass", "transfer ms", "by id, ms", "hottest first, ms", "ratio"]
    table(args, "hebf", header, rows)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    main(parser.parse_args())
