"""Accuracy and GOODPRED by distance in runs of a model (ProMoE, 4.1 and figure 8).

    python benchmarks/goodpred.py demo --cache 25% --read-limit 40MB --learned demo.predictor

Each predictor and distance answers the same prompts, greedily, so that all ask for the same
experts. Accuracy: of the experts used, those among the top-k predicted; GOODPRED: the share
of them that was resident at the request, cached before or prefetched. The other columns are the
outcomes of prefetches and the time of a token; the guard is off.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from common import commit, machine, note, table
from warm_start import PROMPTS

import greenroom
from greenroom.config import SamplingConfig
from greenroom.hf.text.generate import answer

USUAL = ["popularity", "token", "markov", "eamc", "routing-path", "next-gate", "learned"]
ENDS = ("useful", "late", "wasted", "dropped", "displaced")


def run(model: str, prefetch: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[float]]:
    """Answer all prompts; return statistics and the seconds of each decoded token."""
    loaded, tokenizer = greenroom.load(
        model, cache=args.cache, prefetch=prefetch, no_guard=True, read_limit=args.read_limit,
        context=512, predictor=args.learned if prefetch.startswith("learned") else None,
    )  # fmt: skip
    sampling, gaps = SamplingConfig(max_new_tokens=args.tokens, temperature=0.0), []
    try:
        answer(loaded, tokenizer, PROMPTS[0], sampling, raw=True, context=512)
        loaded.greenroom.reset_stats()
        for prompt in PROMPTS[1:]:
            gaps += answer(loaded, tokenizer, prompt, sampling, raw=True, context=512).gaps
        return dict(loaded.greenroom.stats()), gaps
    finally:
        loaded.greenroom.detach()


def row(prefetch: str, stats: dict[str, Any], gaps: list[float]) -> tuple[str, ...]:
    prefetch_stats = stats["prefetch"]
    share = [
        prefetch_stats[name] if prefetch_stats.get("accuracy") else None
        for name in ("accuracy", "goodpred")
    ]
    return (
        prefetch, *("-" if x is None else f"{x:.1%}" for x in share), f"{stats['hit_ratio']:.1%}",
        *(str(prefetch_stats.get(end, 0)) for end in ENDS),
        f"{stats['stall_s'] / len(gaps) * 1e3:.1f}", f"{statistics.fmean(gaps) * 1e3:.1f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--read-limit", default="40MB", metavar="SIZE", help="bytes a second")
    parser.add_argument("--learned", metavar="FILE", help="output file of train-predictor")
    parser.add_argument("--predictors", nargs="+", default=USUAL)
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    args = parser.parse_args()
    rows = [row("off", *run(args.model, "off", args))]
    for name in args.predictors:
        if name == "learned" and not args.learned:
            note("learned: needs --learned FILE")
            continue
        for distance in args.distances:
            try:
                result = run(args.model, f"{name}:{distance}", args)
            except greenroom.errors.UsageError as error:  # one of whole passes has no distance
                note(str(error))
                rows.append(row(name, *run(args.model, name, args)))
                break
            rows.append(row(f"{name}:{distance}", *result))
    print(f"commit {commit()}; {machine()}; cache {args.cache}, {args.read_limit} a second\n")
    header = ("prefetch", "accuracy", "GOODPRED", "hits", *ENDS, "stall ms", "ms a token")
    print(table(header, rows))


if __name__ == "__main__":
    main()
