"""Replicas of a server: TPOT if new requests are given out by the experts that they use.

    python benchmarks/papers/replicas.py --traces DIR

Requests arrive in rounds of --replicas times --answers; each replica answers --answers of them, a
token of each in every pass. All requests are new conversations, so that prefix affinity gives
each to the replica with the fewest requests, in order of arrival (`affinity`). `label`: a replica
gets requests with the same label, and by preference the label that it had before. `routing`: the
requests whose whole routing is nearest to the replica's last ones, which nobody knows beforehand,
and with all requests of the round in view: the bound of a choice by expert fit. `one by one`: by
routing too, but each request when it arrives, among the replicas with a free place.
A replica has --share of the experts and Greenroom's default policy, without prefetching. Two
machines: experts of 12 MiB over a disk of 2 GB/s, and over a bus of 23.9 GB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from common import MODELS, options, recordings, table
from promoe_batches import EXPERT, machine

from greenroom.core.cost import Costs, Link
from greenroom.predictors import OFF
from greenroom.sim.study import Cell, Study
from greenroom.trace import Trace
from greenroom.trace.groups import activation_matrices
from greenroom.trace.trace import starts_of

DISK = 2e9  # bytes a second
Division = list[np.ndarray]  # the requests of each replica in a round


def passes(trace: Trace, rounds: Division, tokens: int) -> Trace:
    """The work of one replica: a pass has one token of each request of a round."""
    begins = [trace.request_starts[each] for each in rounds]
    rows = [begin + token for begin in begins for token in range(tokens)]
    sizes = np.array([row.size for row in rows])
    return Trace(
        experts=trace.experts[np.concatenate(rows)],
        experts_per_layer=trace.experts_per_layer,
        request_starts=starts_of(sizes.reshape(-1, tokens).sum(1)),
        pass_starts=starts_of(sizes),
        pass_prefill=np.zeros(sizes.size, np.bool_),
        labels=("",) * len(rounds),
    )


def nearest(wanted: np.ndarray, left: list[int], likeness: Callable[[int], float], n: int) -> None:
    """Move the `n` requests with the greatest likeness from `left` to `wanted`."""
    chosen = sorted(left, key=likeness, reverse=True)[:n]
    wanted[:] = chosen
    for each in chosen:
        left.remove(each)


def by_fit(round_: np.ndarray, last: Division, traits: np.ndarray) -> Division:
    """Each replica takes the requests whose traits are nearest to those of its last ones."""
    left, size = round_.tolist(), round_.size // len(last)
    division = [np.zeros(size, np.int64) for _ in last]
    for own, before in zip(division, last, strict=True):
        profile = traits[before].sum(0) if before.size else traits[left[0]]
        nearest(own, left, lambda each, profile=profile: float(traits[each] @ profile), size)
    return division


def one_by_one(round_: np.ndarray, last: Division, traits: np.ndarray) -> Division:
    """Each request goes to the replica with a free place whose requests are nearest to it."""
    size = round_.size // len(last)
    division: list[list[int]] = [[] for _ in last]
    for request in round_.tolist():
        free = [replica for replica, own in enumerate(division) if len(own) < size]
        likeness = [
            float(traits[[*last[replica], *division[replica]]].sum(0) @ traits[request])
            / max(1, last[replica].size + len(division[replica]))
            for replica in free
        ]
        division[free[int(np.argmax(likeness))]].append(request)
    return [np.array(own) for own in division]


def tpot_ms(trace: Trace, costs: Costs, capacity: int, seed: int) -> float:
    study = Study.of(trace, "runtime", costs=costs, expert_bytes=EXPERT, seed=seed)
    return float(study.run(Cell("auto", capacity, "step", OFF))["tpot_mean_s"]) * 1e3


def main(args: argparse.Namespace) -> None:
    bus = machine(EXPERT)
    machines = {"disk": replace(bus, links=(Link(DISK, 0.0, 1),)), "bus": bus}
    lines = []
    for model, trace in recordings(args).items():
        rng = np.random.default_rng(args.seed)
        chosen = np.flatnonzero(np.diff(trace.request_starts) >= args.tokens)
        width = args.replicas * args.answers
        order = rng.permutation(chosen)[: chosen.size // width * width]
        rounds = order.reshape(-1, width)[: 2 if args.quick else None]
        counts = activation_matrices(trace).reshape(len(trace.labels), -1).astype(np.float64)
        counts /= np.linalg.norm(counts, axis=1, keepdims=True)
        kinds = sorted({*trace.labels})
        labels = np.array([[each == kind for kind in kinds] for each in trace.labels], np.float64)
        ways: dict[str, list[Division]] = {"affinity": [np.split(r, args.replicas) for r in rounds]}
        fits = {"label": (by_fit, labels), "one by one": (one_by_one, counts),
                "routing": (by_fit, counts)}  # fmt: skip
        for name, (divide, traits) in fits.items():
            last = [np.zeros(0, np.int64)] * args.replicas
            ways[name] = []
            for each in rounds:
                ways[name].append(last := divide(each, last, traits))
        for kind, costs in machines.items():
            times = {
                name: np.mean([
                    tpot_ms(passes(trace, [each[replica] for each in division], args.tokens),
                            costs, int(args.share * trace.offsets[-1]), args.seed)
                    for replica in range(args.replicas)
                ])
                for name, division in ways.items()
            }  # fmt: skip
            base = times["affinity"]
            less = [f"{1 - times[name] / base:.1%}" for name in fits]
            lines.append([MODELS[model], kind, len(rounds) * width, f"{base:.1f}", *less])
    header = ["recording", "machine", "requests", "affinity, ms",
              *(f"{name}: less" for name in ("label", "one by one", "routing"))]  # fmt: skip
    table(args, "replicas", header, lines)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(models=["olmoe-1b-7b", "gpt-oss-20b"])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--answers", type=int, default=8, help="of a replica at a time")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts in memory")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    main(parser.parse_args())
