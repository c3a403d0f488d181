"""Prediction beside the thread that computes, or in it: times of a token, in pairs.

    python benchmarks/predict_in.py demo --cache 25% --read-limit 40MB --predictor demo.predictor

For each predictor the model is loaded twice, with `--predict-in inline` and `worker`. Both continue
the same prompts greedily, in turns of --block tokens; who is first changes from turn to turn. Turns
end when the 95 % interval of the ratio of the times is at most --half-width to either side, or
after --turns. The guard is off. Times are ms a decoded token: all of it (median over the turns),
CPU time of the thread that computes, waits for experts (stall), expert groups (compute).
Overtaken: predictions that the worker dropped because their layer had begun.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import commit, machine, note, ratio, show_ratio, table
from warm_start import PROMPTS

import greenroom

SIDES = ("inline", "worker")
CONTEXT = 512  # tokens; then the next prompt begins
LEAST_TURNS = 20


class Side:
    """A loaded model whose predictor runs in one of the two threads."""

    def __init__(self, predict_in: str, prefetch: str, args: argparse.Namespace) -> None:
        self.model, self.tokenizer = greenroom.load(
            args.model, cache=args.cache, prefetch=prefetch, no_guard=True, context=CONTEXT,
            read_limit=args.read_limit, predict_in=predict_in, prefetch_rule=args.prefetch_rule,
            predictor=args.predictor if prefetch == "learned" else None,
        )  # fmt: skip
        self.block, self.prompts = args.block, 0
        self.seconds: list[float] = []
        self.cpu_s = 0.0
        self.begin_prompt()
        self.decode()  # compiles the predictor, and fills the cache
        self.seconds, self.cpu_s = [], 0.0
        self.model.greenroom.reset_stats()
        self._before = self.model.greenroom.driver.meter.copy()

    def begin_prompt(self) -> None:
        text = PROMPTS[self.prompts % len(PROMPTS)]
        self.prompts += 1
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        self._continue(self.model(ids, use_cache=True, logits_to_keep=1), ids.shape[1])

    def _continue(self, out: object, length: int) -> None:
        self.cache, self.length = out.past_key_values, length  # type: ignore[attr-defined]
        self.next = out.logits[:, -1:].argmax(-1)  # type: ignore[attr-defined]

    def decode(self) -> tuple[float, list[int]]:
        """Decode a block of tokens; return the mean seconds of one, and the tokens."""
        if self.length + self.block > CONTEXT:
            self.begin_prompt()
        tokens, begin, cpu = [], time.perf_counter(), time.thread_time()
        for _ in range(self.block):
            out = self.model(self.next, past_key_values=self.cache, use_cache=True)
            self._continue(out, self.length + 1)
            tokens.append(int(self.next))
        self.seconds.append((time.perf_counter() - begin) / self.block)
        self.cpu_s += time.thread_time() - cpu
        return self.seconds[-1], tokens

    def row(self, name: str) -> tuple[str, ...]:
        stats, meter = self.model.greenroom.stats(), self.model.greenroom.driver.meter
        prefetch, before = stats.prefetch, self._before
        tokens = meter.decodes - before.decodes
        times = (
            statistics.median(self.seconds), self.cpu_s / tokens,
            (meter.waited_s - before.waited_s) / tokens,
            (meter.computed_s - before.computed_s) / tokens,
        )  # fmt: skip
        shares = (stats.hit_ratio, prefetch["accuracy"], prefetch["fetch_rate"])
        counts = (prefetch[each] for each in ("began", "useful", "overtaken"))
        return (
            name, *(f"{x * 1e3:.2f}" for x in times),
            *("-" if x is None else f"{x:.1%}" for x in shares), *map(str, counts),
        )  # fmt: skip


def compare(prefetch: str, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Time both threads in turns with one predictor; return a row for each."""
    sides = [Side(each, prefetch, args) for each in SIDES]
    pairs: list[tuple[float, float]] = []
    try:
        while len(pairs) < args.turns:
            order = (0, 1) if len(pairs) % 2 == 0 else (1, 0)
            out = {which: sides[which].decode() for which in order}
            assert out[0][1] == out[1][1], "the two threads gave different tokens"
            pairs.append((out[0][0], out[1][0]))
            if len(pairs) % LEAST_TURNS == 0:
                note(f"{prefetch} {len(pairs)}: inline / worker {show_ratio(pairs)}")
                _, low, high = ratio(pairs)
                if (high - low) / 2 <= args.half_width:
                    break
        rows = [each.row(f"{prefetch}, {name}") for each, name in zip(sides, SIDES, strict=True)]
        return [(*rows[0], ""), (*rows[1], show_ratio(pairs))]
    finally:
        for each in sides:
            each.model.greenroom.detach()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--read-limit", default="40MB", metavar="SIZE", help="bytes a second")
    parser.add_argument("--predictor", metavar="FILE", help="output of train-predictor")
    parser.add_argument("--predictors", nargs="+", default=["learned", "next-gate", "markov"])
    parser.add_argument("--prefetch-rule", default="value", choices=["value", "top-k", "all"])
    parser.add_argument("--block", type=int, default=8, help="tokens of a turn")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--half-width", type=float, default=0.01)
    args = parser.parse_args()
    if args.predictor is None and "learned" in args.predictors:
        parser.error("learned needs --predictor FILE: make one with `greenroom train-predictor`")
    print(f"commit {commit()}; {machine()}\n")
    rows = [row for prefetch in args.predictors for row in compare(prefetch, args)]
    print(table(
        ("prefetch, thread", "TPOT ms", "CPU ms", "stall ms", "compute ms", "hits", "accuracy",
         "fetch rate", "began", "useful", "overtaken", "inline / worker"),
        rows,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
