"""Every option that trades quality for fewer reads: KL divergence against time per token.

    python benchmarks/lossy.py demo --text FILE --record FILE [--memory 25%] [--read-limit 20MB]

Each option reads the same text, token by token as decoding does, twice: unthrottled for the KL
divergence from the exact model, perplexity, misses and bytes read; then throttled to --read-limit
for the time of a token: in --rounds, in which all options take turns. Times are medians; ratios are
means of groups of GROUP tokens beside the same tokens of the exact model in the same round, with
the 95 % interval of the groups. All have the same memory for experts, --memory of all experts'
bytes. Nothing is prefetched, so misses and output do not depend on the machine.

Subsets of experts are chosen by their TCESS scores (`greenroom trace hot --score tcess`) on another
text, --record. `--figure FILE` draws the result. `--results FILE` stores what was measured, and a
later call measures what the file lacks. `--part quality` and `--part time` measure half of it,
`--part none` nothing. Without times, figure and table have bytes alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, show_ratio

from greenroom.config import LoadConfig, RecordConfig, SamplingConfig, show_bytes
from greenroom.sim.table import text_table

GROUP = 8  # tokens whose times are one sample
SETTLE = 8  # tokens after the beginning of a text whose times do not count
LETTERS = 600  # of a recorded request
REQUESTS = 40  # recorded
COPIES = "copies"  # the pack with low-precision copies
COLORS = {
    "exact": "#333333", "cache bias": "#0072b2", "skip": "#e69f00", "substitute": "#cc79a7",
    "int4 copies": "#009e73", "subset": "#d55e00", "two at once": "#56b4e9",
}  # fmt: skip


@dataclass
class Way:
    """A way to read fewer experts: a model, options of a run, and what was measured."""

    kind: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # a pack's name; "" for the model itself
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> list[float]:
        """Seconds of the groups of tokens, of all rounds."""
        return [sum(each[at : at + GROUP]) for each in self.measured["seconds"]
                for at in range(0, len(each) - GROUP + 1, GROUP)]  # fmt: skip


def ways(shares: list[float]) -> Iterator[Way]:
    """List the compared options; `shares` are those of the experts that subsets have."""
    yield Way("exact", "exact")
    for bias in (0.05, 0.1, 0.2, 0.4):
        yield Way("cache bias", f"--cache-bias {bias}", {"cache_bias": bias})
    for below in (0.1, 0.2, 0.3):
        yield Way("skip", f"--skip-below {below}", {"skip_below": below})
    for below in (0.1, 0.2, 0.4):
        yield Way("substitute", f"--substitute-below {below}", {"substitute_below": below})
    for below in (0.2, 0.4, 0.8):
        yield Way(
            "int4 copies", f"--miss-precision int4 --low-below {below}",
            {"miss_precision": "int4", "low_below": below}, COPIES,
        )  # fmt: skip
    bias = {"cache_bias": 0.1}
    yield Way("two at once", "--cache-bias 0.1 --skip-below 0.1", {**bias, "skip_below": 0.1})
    yield Way("two at once", "--cache-bias 0.1 --skip-below 0.2", {**bias, "skip_below": 0.2})
    yield Way(
        "two at once", "--cache-bias 0.1 --miss-precision int4 --low-below 0.8",
        {**bias, "miss_precision": "int4", "low_below": 0.8}, COPIES,
    )  # fmt: skip
    for share in shares:
        yield Way("subset", f"pack --keep {share:.0%}", {}, f"keep-{share:g}")


def make_models(args: argparse.Namespace, root: Path, every: list[Way]) -> dict[str, str]:
    """Make the packs that the options need; return their folders, by name."""
    from greenroom.hf.pack.packing import pack
    from greenroom.hf.pack.subset import Keep
    from greenroom.hf.variants.subset import ExpertSubset
    from greenroom.trace import load

    folders, trace = {"": args.model}, None
    missing = [each for each in every if not {"kl", "seconds"} <= each.measured.keys()]
    for name in dict.fromkeys(way.model for way in missing if way.model):
        folders[name] = str(root / name)
        if name == COPIES:
            pack(args.model, root / name, "same", precision="int4")
            continue
        if trace is None:
            record(args, root / "trace.safetensors")
            trace = load(root / "trace.safetensors")
        share = float(name.removeprefix("keep-"))

        def choose(catalog: Any, share: float = share, trace: Any = trace) -> ExpertSubset:
            return ExpertSubset.of_trace(trace, share, "tcess", catalog)

        pack(args.model, root / name, "same", keep=Keep(choose))
    return folders


def record(args: argparse.Namespace, path: Path) -> None:
    """Record the routing of a text, with gate weights."""
    from greenroom.hf.load.load import load_with
    from greenroom.hf.measure.recording import record as record_prompts
    from greenroom.trace.prompts import Prompt

    text = args.record.read_text()[: LETTERS * REQUESTS]
    prompts = [Prompt(text[at : at + LETTERS], "text") for at in range(0, len(text), LETTERS)]
    model, tokenizer = load_with(args.model, LoadConfig(cache="100%"), remember=False)
    try:
        record_prompts(
            model, tokenizer, prompts, path, sampling=SamplingConfig(max_new_tokens=1),
            recording=RecordConfig(weights=True, raw=True), name="model",
        )  # fmt: skip
    finally:
        model.greenroom.detach()


def config_of(way: Way, memory: int, read_limit: str | None) -> LoadConfig:
    """Return the config of a run: exactly so many bytes of experts, and no prefetching."""
    return LoadConfig(cache=memory, prefetch="off", read_limit=read_limit, **way.options)


def measure_quality(
    args: argparse.Namespace, every: list[Way], folders: dict[str, str], memory: int
) -> None:
    """Measure each option's distance from the exact model, and its misses."""
    from greenroom.hf.check.passes import streamed_model
    from greenroom.hf.check.windows import (
        LogitDistance,
        compare_windows,
        cut_windows,
        spool_windows,
    )
    from greenroom.hf.model.skeleton import ModelSkeleton

    skeleton, text = ModelSkeleton.of(find_model(args.model)), args.text.read_text()
    windows = cut_windows((args.model,), (skeleton,), text, args.quality_tokens)
    with tempfile.TemporaryFile() as spool:
        with streamed_model(args.model, config_of(every[0], memory, None)) as model:
            spooled = spool_windows(model, windows, 1, spool)
        for way in (each for each in every if "kl" not in each.measured):
            with streamed_model(folders[way.model], config_of(way, memory, None)) as model:
                rows = compare_windows(model, windows, 1, spool, spooled)
                stats = model.greenroom.stats()
            distance, _ = LogitDistance.of(rows)
            tokens = sum(map(len, windows))
            way.measured |= {
                "kl": distance.kl_mean,
                "kl_p99": distance.kl_p99,
                "perplexity": distance.perplexity,
                "same_top": distance.same_top,
                "misses": (stats.expert_requests - stats.expert_hits) / tokens,
                "read": stats.bytes_read / tokens,
                "inexact": (stats.approximated or {}).get("inexact_share") or 0.0,
            }
            print(way.name, {k: round(v, 4) for k, v in way.measured.items()}, flush=True)


def find_model(name: str) -> Any:
    from greenroom.hf.checkpoint.resolve import find_checkpoint

    return find_checkpoint(name)


def measure_time(
    args: argparse.Namespace, every: list[Way], folders: dict[str, str], memory: int
) -> None:
    """Measure the time of a token of a text that every option reads."""
    import torch

    from greenroom.hf.check.passes import Passes, streamed_model
    from greenroom.hf.checkpoint.tokenizer import tokenizer_of

    ids = tokenizer_of(find_model(args.model))(args.text.read_text())["input_ids"]
    tokens = torch.tensor([ids[: args.tokens]]).split(1, dim=1)
    missing = [each for each in every if "seconds" not in each.measured]
    measured = {way.name: list[list[float]]() for way in missing}
    for number, way in ((number, way) for number in range(args.rounds) for way in missing):
        seconds = []
        config = config_of(way, memory, args.read_limit)
        with streamed_model(folders[way.model], config) as model, torch.inference_mode():
            passes = Passes(model)
            for token in tokens:
                begin = time.perf_counter()
                passes(token)
                seconds.append(time.perf_counter() - begin)
        measured[way.name].append(seconds[SETTLE:])
        print(number + 1, way.name, f"{np.median(seconds[SETTLE:]) * 1e3:.1f} ms", flush=True)
    for way in missing:
        way.measured["seconds"] = measured[way.name]
        way.measured["tpot"] = float(np.median(np.concatenate(measured[way.name])))


def table(every: list[Way]) -> str:
    """Show all options; reads and times also as ratios to the exact run."""
    exact, rows, timed = every[0].measured, [], all("tpot" in way.measured for way in every)
    for way in every:
        each = way.measured
        times: tuple[str, ...] = ()
        if timed:
            ratio = show_ratio(list(zip(way.groups, every[0].groups, strict=True)))
            times = f"{each['tpot'] * 1e3:.1f}", ratio
        rows.append((
            way.name, *times,
            show_bytes(each["read"]), f"{each['read'] / exact['read']:.2f}",
            f"{each['misses']:.2f}", f"{each['kl']:.2g}", f"{each['kl_p99']:.2g}",
            f"{each['perplexity']:.2f}", f"{each['same_top']:.1%}",
        ))  # fmt: skip
    header = ("option", *(["TPOT ms", "ratio"] * timed), "read a token", "ratio", "misses a token",
              "KL", "KL p99", "perplexity", "same top")  # fmt: skip
    return text_table(header, rows, left=1)


def draw(every: list[Way], path: Path) -> None:
    """Draw KL divergence and perplexity over the time of a token, or over bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure_of = "tpot" if all("tpot" in way.measured for way in every) else "read"
    what = "time per token" if figure_of == "tpot" else "bytes read per token"
    exact = every[0].measured
    with pyplot.rc_context({"svg.hashsalt": "greenroom", "font.size": 9}):
        figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
        for axes, quality in zip(panels, ("kl", "perplexity"), strict=True):
            for kind in dict.fromkeys(way.kind for way in every[1:]):
                points = sorted(
                    ((way.measured[figure_of] / exact[figure_of], way.measured[quality], way.name)
                     for way in every if way.kind == kind), reverse=True,
                )  # fmt: skip
                axes.plot(*zip(*(each[:2] for each in points), strict=True), "o-", label=kind,
                          color=COLORS[kind])  # fmt: skip
                for x, y, name in points:
                    axes.annotate(name.split()[-1], (x, y), (4, 4), textcoords="offset points",
                                  fontsize=7, color=COLORS[kind])  # fmt: skip
            axes.axvline(1, color=COLORS["exact"], linestyle=":", linewidth=1)
            axes.set(xlabel=f"{what}, exact = 1")
        panels[0].set(ylabel="KL divergence from exact, nats", yscale="log")
        panels[1].set(ylabel="perplexity (dotted: exact)")
        panels[1].axhline(exact["perplexity"], color=COLORS["exact"], linestyle=":", linewidth=1)
        lines, labels = panels[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), frameon=False)
        figure.savefig(path, metadata={"Date": None})


def measure(args: argparse.Namespace, every: list[Way], memory: int) -> None:
    """Make the packs, and measure the parts that --part names."""
    with tempfile.TemporaryDirectory() as root:
        folders = make_models(args, Path(root), every)
        if args.part != "time":
            measure_quality(args, every, folders, memory)
        if args.part != "quality":
            measure_time(args, every, folders, memory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--read-limit", default="20MB")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5, help="of times")
    parser.add_argument("--quality-tokens", type=int, default=512)
    parser.add_argument("--keep", default="0.75,0.5")
    parser.add_argument("--part", choices=("both", "quality", "time", "none"), default="both")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    from greenroom.hf.memory.slots import slots_for
    from greenroom.hf.model.skeleton import ModelSkeleton

    every = list(ways([float(share) for share in args.keep.split(",")]))
    if args.results is not None and args.results.exists():
        stored = json.loads(args.results.read_text())
        for way in every:
            way.measured = stored.get(way.name, {})
    catalog = ModelSkeleton.of(find_model(args.model)).catalog
    memory = slots_for(args.memory, catalog, "memory") * catalog.slot_bytes
    print(machine())
    if args.part != "none":
        measure(args, every, memory)
    if args.results is not None:
        args.results.write_text(json.dumps({way.name: way.measured for way in every}, indent=1))
    if all("kl" in way.measured for way in every):
        print(table(every))
        if args.figure is not None:
            draw(every, args.figure)


if __name__ == "__main__":
    main()
