"""Approximated misses: gain in time, and cost in quality.

    python benchmarks/precision.py MODEL --text FILE [--cache 25%] [--read-limit 100MB]
    python benchmarks/precision.py --traces TRACE ... [--capacity 12.5%,25%,50%]

With MODEL: packs of it are made in --folder, unless they are there, or for the while (as stored
with copies in int4 and in int8, and int8 that contains int4). The same prompts are answered in
turns by every way of serving misses, throttled to --read-limit; TPOT is the median of an answer's,
and of answers; its ratio to the exact run of the same pack with an interval over rounds, bytes read
a token, and the shares that were not exact. With --text, KL divergence and perplexity of the text
read token by token, against the exact run of the same pack.

With --traces: recordings that hold gate weights, simulated. An expert computes in 1 ms, a layer's
other parts in 1 ms, and a transfer of an exact expert takes 1, 2 or 4 ms.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import machine

from greenroom.config import LoadConfig, SamplingConfig, show_bytes
from greenroom.sim.table import text_table

PROMPTS = (
    "Explain how a library decides which books to keep on the front shelves.",
    "Once upon a time there was a stage manager who could not find the lead",
    "def merge(a, b):\n    # merges two sorted lists into one sorted list\n",
)
PACKS = {"same+int4": ("same", "int4"), "same+int8": ("same", "int8"),
         "int8+int4": ("int8", "int4")}  # fmt: skip
SETTLE = 8  # tokens after a prompt that are not counted
EXPERT = 1 << 20  # bytes of a simulated expert, in four chunks


@dataclass
class Way:
    """A way to serve misses: a pack and options of a run, with its results by round."""

    pack: str
    options: dict[str, Any]
    tpots: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)
    approximations: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        option_texts = [f"{key.replace('_', '-')} {value}" for key, value in self.options.items()]
        return ", ".join(option_texts) or "exact"


def ways(packs: list[str]) -> Iterator[Way]:
    """The compared ways of serving misses."""
    for pack in packs:
        precision = PACKS[pack][1]
        yield Way(pack, {})
        for low in (0.2, 0.4, 0.8):
            yield Way(pack, {"miss_precision": precision, "low_below": low})
    yield Way(packs[0], {"miss_precision": "int4", "low_below": 0.4, "low_follow": True})
    yield Way(packs[0], {"miss_precision": "int4", "low_below": 0.4, "skip_below": 0.1})
    for below in (0.1, 0.2):
        yield Way(packs[0], {"skip_below": below})
    for below in (0.2, 0.4):
        yield Way(packs[0], {"substitute_below": below})


def answer_once(way: Way, folder: Path, args: argparse.Namespace, prompt: str, seed: int) -> None:
    """Answer one prompt with a newly loaded model, and record its times."""
    from greenroom.hf.load.load import load_with
    from greenroom.hf.text.generate import answer

    config = LoadConfig(
        cache=args.cache, read_limit=args.read_limit, prefetch=args.prefetch, kernels=args.kernels,
        **way.options,
    )  # fmt: skip
    model, tokenizer = load_with(str(folder), config, remember=False)
    try:
        greenroom = model.greenroom
        sampling = SamplingConfig(max_new_tokens=args.tokens, temperature=1.0, seed=seed)
        done = answer(model, tokenizer, prompt, sampling, raw=True, context=2048, to_the_end=True)
        stats = greenroom.stats()
    finally:
        model.greenroom.detach()
    way.tpots.append(float(np.median(done.gaps[SETTLE:])))
    way.nbytes.append(stats.bytes_read / (done.prompt_tokens + done.new_tokens))
    way.approximations = stats.approximated


def measured(args: argparse.Namespace, folders: dict[str, Path]) -> list[Way]:
    """Measure all ways in turns; the first one changes from round to round."""
    every = list(ways(list(folders)))
    for number in range(-1, args.rounds):
        if number < 0:  # not counted
            answer_once(Way(every[0].pack, {}), folders[every[0].pack], args, PROMPTS[0], 0)
            continue
        for way in (*every[number % len(every) :], *every[: number % len(every)]):
            answer_once(way, folders[way.pack], args, PROMPTS[number % len(PROMPTS)], number)
    return every


def packs_in(root: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Return the packs by name, and build those that are missing."""
    from greenroom.hf.pack.packing import pack

    folders = {name: root / name for name in args.packs.split(",")}
    for name, folder in folders.items():
        if not folder.is_dir():
            kind, precision = PACKS[name]
            packed = pack(args.model, folder, kind, precision=precision)
            print(
                f"{name}: {show_bytes(packed.nbytes)}, copies add {show_bytes(packed.copy_bytes)}"
            )
    return folders


def of_model(args: argparse.Namespace, root: Path) -> None:
    folders = packs_in(root, args)
    if args.rounds:
        every = measured(args, folders)
        exact = {way.pack: way for way in every if not way.options}
        rows = [timed(way, exact[way.pack]) for way in every]
        header = ("pack", "misses", "TPOT ms", "ratio", "read a token", "inexact")
        print(f"\n{machine()}\n{text_table(header, rows, left=2)}", flush=True)
    if args.text is not None:
        rows = [row for way in ways(list(folders)) if way.options
                for row in [quality_of(way, folders[way.pack], args)]]  # fmt: skip
        header = ("pack", "misses", "KL", "KL p99", "perplexity", "exact", "same top", "inexact")
        print(f"\n{text_table(header, rows, left=2)}")


def timed(way: Way, exact: Way) -> tuple[str, ...]:
    """A row of times."""
    from greenroom.plan import intervals

    middle, low, high = intervals.ratio_interval(way.tpots, exact.tpots)
    print(json.dumps({"pack": way.pack, **way.options, "tpots": way.tpots}))
    return (
        way.pack, way.name, f"{np.median(way.tpots) * 1e3:.2f}",
        f"{middle:.2f} ({low:.2f} to {high:.2f})" if way.options else "1",
        show_bytes(float(np.mean(way.nbytes))),
        f"{(way.approximations or {}).get('inexact_share') or 0:.1%}",
    )  # fmt: skip


def quality_of(way: Way, folder: Path, args: argparse.Namespace) -> tuple[str, ...]:
    """A row of KL divergence and perplexity against the exact run."""
    from greenroom.hf.check.quality import quality

    result = quality(
        str(folder), args.text.read_text(), cache=args.cache, tokens=args.quality_tokens,
        kernels=args.kernels, approximation=way.options,
    )  # fmt: skip
    assert result.approximated is not None
    row = (
        way.pack, way.name, f"{result.kl_mean:.2g}", f"{result.kl_p99:.2g}",
        f"{result.perplexity:.5g}", f"{result.original_perplexity:.5g}", f"{result.same_top:.1%}",
        f"{result.approximated['inexact_share']:.1%}",
    )  # fmt: skip
    print(*row, flush=True)
    return row


def of_traces(args: argparse.Namespace) -> None:
    from greenroom.core.config.scheduler import SchedulerConfig
    from greenroom.core.cost import Costs, Link, Work
    from greenroom.policies import policy
    from greenroom.sim.event_driven import EventOptions, simulate_events
    from greenroom.sim.study import capacities
    from greenroom.trace import load, stream

    served: dict[str, tuple[dict[str, Any], bool]] = {  # options, are copies nested?
        "exact": ({}, False),
        "int8 0.4": ({"miss_precision": "int8"}, False),
        "int4 0.4": ({"miss_precision": "int4"}, False),
        "int4, follow": ({"miss_precision": "int4", "low_follow": True}, False),
        "nested 0.4": ({"miss_precision": "int4"}, True),
        "nested, follow": ({"miss_precision": "int4", "low_follow": True}, True),
        "int4 0.4, skip 0.1": ({"miss_precision": "int4", "skip_below": 0.1}, False),
        "skip 0.1": ({"skip_below": 0.1}, False),
        "substitute 0.2": ({"substitute_below": 0.2}, False),
    }
    for path in args.traces:
        trace = load(path).head(args.tokens)
        requests, rows = stream(trace, "runtime"), []
        for capacity in capacities(args.capacity, int(trace.offsets[-1])):
            for ratio in (1.0, 2.0, 4.0):
                link = Link(EXPERT / (ratio * 1e-3), 0.0, 1)
                costs = Costs((link,), Work.constant(1e-3), Work.constant(1e-3))
                row = [f"{capacity / trace.offsets[-1]:.1%}", f"{ratio:g}"]
                for options, nested in served.values():
                    config = SchedulerConfig(**options)
                    result = simulate_events(
                        trace, requests, capacity, policy("lru"), costs, EXPERT, "off",
                        EventOptions(chunk_bytes=EXPERT // 4, config=config, nested=nested),
                    )  # fmt: skip
                    share = result.as_json().get("inexact_share", 0.0)
                    row.append(f"{np.median(result.times.gaps) * 1e3:.1f} ({share:.0%})")
                rows.append(row)
        print(f"{path.name}: median TPOT in ms (share of evaluations that were not exact)")
        print(text_table(["capacity", "transfer", *served], rows, left=0), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--packs", default=",".join(PACKS))
    parser.add_argument("--folder", type=Path, help="folder for packs, which are reused")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--read-limit", default="100MB")
    parser.add_argument("--prefetch", default="off")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quality-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--traces", nargs="*", type=Path, default=[])
    parser.add_argument("--capacity", default="12.5%,25%,50%")
    args = parser.parse_args()
    if args.traces:
        of_traces(args)
    if args.model and args.folder:
        of_model(args, args.folder)
    elif args.model:
        with tempfile.TemporaryDirectory() as root:
            of_model(args, Path(root))


if __name__ == "__main__":
    main()
