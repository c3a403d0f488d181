"""Accuracy and GOODPRED by distance in runs of a model (ProMoE, 4.1 and figure 8).

    python benchmarks/goodpred.py demo --cache 25% --read-limit 40MB --learned demo.predictor

Each predictor and distance answers the same prompts, greedily, so that all ask for the same
experts. Accuracy: of the experts used, those among the top-k predicted. Fetch rate: of the top-k
predicted that were not resident, those prefetched in time. GOODPRED: accuracy x fetch rate of each
layer and distance, and its mean over layers. The other columns are the outcomes of prefetches and
the time of a token; the guard is off. `learned` runs once for each FILE, at the file's distance.
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


def run(
    model: str, prefetch: str, args: argparse.Namespace, file: str | None = None
) -> tuple[dict[str, Any], list[float]]:
    """Answer all prompts; return statistics and the seconds of each decoded token."""
    loaded, tokenizer = greenroom.load(
        model, cache=args.cache, prefetch=prefetch, no_guard=True, read_limit=args.read_limit,
        context=512, predictor=file,
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
        for name in ("accuracy", "fetch_rate", "goodpred")
    ]
    return (
        prefetch, *("-" if x is None else f"{x:.1%}" for x in share), f"{stats['hit_ratio']:.1%}",
        *(str(prefetch_stats.get(end, 0)) for end in ENDS),
        f"{stats['stall_s'] / len(gaps) * 1e3:.1f}", f"{statistics.fmean(gaps) * 1e3:.1f}",
    )  # fmt: skip


def by_layer(ran: dict[str, dict[str, Any]]) -> str:
    """Table of GOODPRED and its factors, by layer and distance, for each predictor."""
    columns = ("accuracy", "fetch_rate", "goodpred")
    rows = [
        (name, str(each["layer"]), str(each["distance"]),
         *("-" if each[c] is None else f"{each[c]:.1%}" for c in columns))
        for name, stats in ran.items()
        for each in stats["prefetch"]["goodpred_by_layer"]
    ]  # fmt: skip
    return table(("prefetch", "layer", "distance", "accuracy", "fetch rate", "GOODPRED"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--read-limit", default="40MB", metavar="SIZE", help="bytes a second")
    parser.add_argument(
        "--learned", metavar="FILE", nargs="+", default=[], help="output files of train-predictor"
    )
    parser.add_argument("--by-layer", action="store_true", help="also a table by layer, distance")
    parser.add_argument("--predictors", nargs="+", default=USUAL)
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    args = parser.parse_args()
    rows, ran = [row("off", *run(args.model, "off", args))], dict[str, dict[str, Any]]()

    def measure(prefetch: str, file: str | None = None) -> None:
        stats, gaps = run(args.model, prefetch, args, file)
        label = prefetch if file is None else f"{prefetch}:{stats['prefetch']['distance']}"
        ran[label] = stats
        rows.append(row(label, stats, gaps))

    for name in args.predictors:
        if name == "learned":
            for file in args.learned:
                measure(name, file)
            if not args.learned:
                note("learned: needs --learned FILE")
            continue
        for distance in args.distances:
            try:
                measure(f"{name}:{distance}")
            except greenroom.errors.UsageError as error:  # one of whole passes has no distance
                note(str(error))
                measure(name)
                break
    print(f"commit {commit()}; {machine()}; cache {args.cache}, {args.read_limit} a second\n")
    columns = ("accuracy", "fetch rate", "GOODPRED", "hits", *ENDS, "stall ms", "ms a token")
    print(table(("prefetch", *columns), rows))
    if args.by_layer:
        print(f"\n{by_layer(ran)}")


if __name__ == "__main__":
    main()
