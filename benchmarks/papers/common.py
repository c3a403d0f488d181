"""Shared helpers of this folder: options, traces, drawing and tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Before Numba is imported: these scripts need one core.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("matplotlib is missing: pip install 'greenroom[bench]'")

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from greenroom.trace import Trace, load
from greenroom.trace.trace import starts_of

MODELS = {
    "olmoe-1b-7b": "OLMoE-1B-7B",
    "gpt-oss-20b": "gpt-oss-20b",
    "deepseek-v2-lite": "DeepSeek-V2-Lite (prefill)",
    "mixtral-8x7b": "Mixtral-8x7B",
}
# The same policy has the same colour everywhere (Okabe and Ito's, that all eyes can tell apart).
COLOURS = {
    "OPT": "#4d4d4d",
    "LRU": "#0072b2",
    "LRU-Dist": "#56b4e9",
    "LLRU": "#d55e00",
    "Marking": "#cc79a7",
    "LFU": "#009e73",
    "LCP": "#d55e00",
    "RND": "#cc79a7",
    "MoE-Infinity": "#d55e00",
}
BY_MODEL = dict(zip(MODELS, ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))
STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "savefig.dpi": 160,
    "svg.hashsalt": "greenroom",  # the same figure is the same file
}


def options(doc: str | None, traces: bool = True) -> argparse.ArgumentParser:
    """The options that all scripts have; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-data/papers"), metavar="DIR",
        help="where tables (NAME.md) and figures (NAME.svg, NAME.png) go (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a smaller run, in seconds")
    if traces:
        parser.add_argument(
            "--traces", type=Path, default=Path("../shared/traces"), metavar="DIR",
            help="recordings: NAME.npz for the names of --models (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME",
            help="which recordings (default: all of %(choices)s)",
        )  # fmt: skip
        parser.add_argument(
            "--limit", type=int, default=40_000, metavar="N",
            help="tokens of each recording (default: %(default)s; 3000 with --quick)",
        )  # fmt: skip
    return parser


def limit(args: argparse.Namespace) -> int:
    """Largest number of tokens that a script takes of a recording."""
    return min(args.limit, 3000) if args.quick else int(args.limit)


def recordings(args: argparse.Namespace) -> dict[str, Trace]:
    """The requested recordings, with all of their tokens."""
    return {name: load(args.traces / f"{name}.npz") for name in args.models}


def experts_of(trace: Trace) -> int:
    """Experts of all layers."""
    return int(trace.offsets[-1])


def figure(rows: int, columns: int, width: float, height: float, **more: Any) -> tuple[Figure, Any]:
    """A figure of so many panels, sizes in inches; the axes as an array [rows, columns]."""
    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **more)


def share_of_legend(fig: Figure, axes: Axes, columns: int) -> None:
    """One legend above all panels, of the curves of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", ncols=columns)


def save(fig: Figure, args: argparse.Namespace, name: str) -> None:
    """Write the figure as SVG and PNG."""
    args.out.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.out / f"{name}.svg", metadata={"Date": None})
    fig.savefig(args.out / f"{name}.png")
    plt.close(fig)
    print(f"{args.out / name}.svg")


def table(
    args: argparse.Namespace, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Write and print a markdown table, and an empty line; floats have three digits."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] * len(header)) + "|"]
    lines += ["| " + " | ".join(_cell(x) for x in row) + " |" for row in rows]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines) + "\n", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value)


def percent(value: float) -> str:
    """A share as a percentage, one digit after the point."""
    return f"{100 * value:.1f} %"


def heads(trace: Trace, tokens: int, requests: Sequence[int] | np.ndarray) -> Trace:
    """The first tokens of some requests, in order, each token a pass."""
    starts, lengths = trace.request_starts[:-1], np.diff(trace.request_starts).clip(max=tokens)
    rows = np.concatenate([np.arange(starts[r], starts[r] + lengths[r]) for r in requests])
    return Trace(
        experts=trace.experts[rows],
        experts_per_layer=trace.experts_per_layer,
        request_starts=starts_of(lengths[np.asarray(requests)]),
        pass_starts=np.arange(len(rows) + 1),
        pass_prefill=np.zeros(len(rows), np.bool_),
        labels=tuple(trace.labels[r] for r in requests),
    )
