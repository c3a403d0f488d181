"""Prompts with and without prefetching: time to the first token, at set ratios.

    python benchmarks/replay/prefill.py bench-data/olmoe-8 olmoe-1b-7b.npz [--prompt 128]

A prompt is the first tokens of a request of the recording as one pass, after requests that fill
the cache token by token, with nothing computed. Ratio: the time of the bytes that the reactive run
misses, over that of the prompt with everything resident. Prompts of all variants are the same, in
an order that turns; `x reactive` is over pairs of the same prompt.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from rig import Rig, arguments, forced
from speed import REACTIVE, Session, misses, ratio_of, run, sessions

from common import commit, machine, note, show_ratio, table  # isort: skip
from greenroom.trace.trace import starts_of


def with_prompt(session: Session) -> Session:
    """The session with its last request as one prefill pass."""
    trace, filling = session.trace, session.filling
    prompt = trace.tokens - filling
    return Session(
        replace(
            trace,
            pass_starts=starts_of(np.r_[np.ones(filling, np.int64), prompt]),
            pass_prefill=np.r_[np.zeros(filling, bool), True],
        ),
        filling,
        filling,
    )


def resident_prompt_s(rig: Rig, chosen: list[Session]) -> float:
    """Median seconds of a prompt with all experts resident, over the prompts."""
    rig.attach(rig.catalog.experts)
    rig.fill()
    seconds = []
    for session in [chosen[0], *chosen]:  # the first one warms up
        with forced(rig.model, session.trace) as routing:
            seconds += routing.play(session.counted)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=[0.25, 0.5])
    add("--ratios", type=ratio_of, nargs="+", default=[0.5, 1.0, 2.0, None],
        help="transfer / compute, or disk")  # fmt: skip
    add(
        "--variants",
        nargs="+",
        default=[REACTIVE, "markov"],
        metavar="NAME",
        help=f"{REACTIVE}, and what --prefetch takes; the first is what others are compared with",
    )
    add("--guard", action="store_true", help="with the guard, as it is by default in a run")
    add("--prompt", type=int, default=128, help="tokens (default: %(default)s)")
    add("--fill", type=int, default=1, help="requests before (default: %(default)s)")
    add("--repeats", type=int, default=3, help="prompts (default: %(default)s)")
    args = parser.parse_args()
    rig = Rig(args.model, args.trace, kernels=args.kernels, threads=args.threads)
    print(f"commit {commit()}; {machine()}", flush=True)
    print(f"kernels {args.kernels}, threads {args.threads}, policy {args.policy}\n")
    chosen = [
        with_prompt(session)
        for session in sessions(rig.trace, args.prompt, args.fill, 0, args.repeats)
    ]
    computing = resident_prompt_s(rig, chosen)
    note(f"a prompt with everything resident: {computing * 1e3:.0f} ms")
    disk = rig.disk() if None in args.ratios else None
    rows = []
    for share in args.shares:
        capacity = int(rig.catalog.experts * share)
        missed = sum(misses(session, capacity, args.policy) for session in chosen)
        missed *= rig.expert_bytes / len(chosen)
        for each in args.ratios:
            bandwidth = None if each is None else missed / (each * computing)
            runs = measure(rig, args, chosen, capacity, bandwidth)
            carrying = missed / (bandwidth or disk)
            where = f"{share:.1%}, {'disk' if each is None else f'ratio {each:g}'}"
            for variant, records in runs.items():
                pairs = [
                    (a["seconds"][0], b["seconds"][0])
                    for a, b in zip(runs[args.variants[0]], records, strict=True)
                    if variant != args.variants[0]
                ]
                took, stall = (
                    statistics.median(value(r) for r in records)
                    for value in (lambda r: r["seconds"][0], lambda r: r["stall_s"])
                )
                rows.append((
                    where, variant, f"{took * 1e3:.0f}", f"{stall * 1e3:.0f}",
                    f"{statistics.fmean(r['bytes'] for r in records) / 1e9:.2f}",
                    f"{computing * 1e3:.0f}", f"{carrying * 1e3:.0f}",
                    f"{took / max(computing, carrying):.2f}", show_ratio(pairs),
                ))  # fmt: skip
                if args.out:
                    with args.out.open("a") as file:
                        for r in records:
                            file.write(json.dumps({
                                "prompt": args.prompt, "share": share, "ratio": each,
                                "variant": variant, "computing_s": computing,
                                "carrying_s": carrying, **r,
                            }) + "\n")  # fmt: skip
    header = (
        "resident, transfer / compute", "variant", "TTFT ms", "stall ms", "GB moved",
        "computing ms", "carrying ms", "x the longer", "x reactive",
    )  # fmt: skip
    print(table(header, rows))


def measure(
    rig: Rig, args: Any, chosen: list[Session], capacity: int, bandwidth: float | None
) -> dict[str, list[dict[str, Any]]]:
    """Run every variant, once for each prompt."""
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for repeat, session in enumerate(chosen):
        turn = repeat % len(args.variants)
        for variant in args.variants[turn:] + args.variants[:turn]:
            records[variant].append(run(rig, session, capacity, bandwidth, args, variant))
    return {variant: records[variant] for variant in args.variants}


if __name__ == "__main__":
    main()
