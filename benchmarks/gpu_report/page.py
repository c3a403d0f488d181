"""The results as one page: results.json, summary.md, and plots where matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import shapes
from ledger import DONE, MACHINE, Ledger, Row

Rows = dict[tuple[str, str], Row]


def write(out: Path, smoke: bool) -> None:
    """Write the page of the ledger in this folder."""
    rows = Ledger(out).rows()
    nested: dict[str, dict[str, Row]] = {}
    for (part, cell), row in rows.items():
        nested.setdefault(part, {})[cell] = row
    (out / "results.json").write_text(json.dumps(nested, indent=1))
    parts = [_head(rows), _tests(rows), _kernels(rows, smoke), _models(rows, smoke), _demo(rows)]
    (out / "summary.md").write_text("\n\n".join([*filter(None, parts), _missing(rows)]) + "\n")
    plots(rows, out, smoke)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def values(rows: Rows, part: str, cell: str) -> dict[str, Any]:
    """The results of a cell; empty unless it is done."""
    row = rows.get((part, cell), {})
    return row["values"] if row.get("status") == DONE else {}


def _head(rows: Rows) -> str:
    machine = values(rows, MACHINE, "here")
    if not machine:
        return "# A first run on a GPU"
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items() if v)
    gpu = machine.get("gpu", "no GPU")
    dry_run = "\n\n**A dry run on a CPU: these figures mean nothing.**"
    return (
        f"# A first run on a GPU\n\n{gpu}, {machine['cores']} cores,"
        f" {machine['memory_bytes'] / 1e9:.0f} GB of host memory; commit {machine['commit']};"
        f" Python {machine['python']}, {packages}" + (dry_run if machine["smoke"] else "")
    )


def _tests(rows: Rows) -> str:
    rows_shown, failures = [], []
    for cell in shapes.cells("tests", smoke=False):
        if run := rows.get(("tests", cell), {}).get("values"):  # of a run that was cut short too
            counts = [run[outcome] for outcome in ("passed", "failed", "skipped")]
            cut = "" if run["complete"] else "cut short"
            rows_shown.append([cell, *counts, f"{run['seconds']:.0f}", cut])
            for each in run["failures"]:
                last = each["reason"].splitlines()[-1:] or [""]
                failures.append(f"- `{each['test']}`: {last[0]}")
    if not rows_shown:
        return ""
    header = ["tests", "passed", "failed", "skipped", "s", ""]
    return "\n\n".join(
        ["## Tests\n\n" + table(header, rows_shown), *filter(None, ["\n".join(failures)])]
    )


def _kernels(rows: Rows, smoke: bool) -> str:
    memory, rows_shown = values(rows, "kernels", "memory"), []
    grouped: dict[tuple[str, int], float] = {}
    names = [c.split(":") for c in shapes.cells("kernels", smoke) if ":" in c]
    for name, encoding in names:
        for row in values(rows, "kernels", f"{name}:{encoding}").get("rows", []):
            if encoding == shapes.GROUPED:
                grouped[name, row["tokens"]] = row["us"]
            base = grouped.get((name, row["tokens"]))
            rows_shown.append([
                name, encoding, row["tokens"], f"{row['us']:.1f}", f"{row['gb_s']:.0f}",
                f"{row['gb_s'] / memory['copy_gb_s']:.0%}" if memory else "",
                f"{row['tflop_s']:.1f}", f"{base / row['us']:.2f}" if base else "",
                f"{row['host_ms'] * 1e3:.0f}" if "host_ms" in row else "", row["timed"],
                f"{row['distance']:.1e}" if "distance" in row else "",
            ])  # fmt: skip
    if not rows_shown:
        return ""
    header = ["shape", "encoding", "tokens", "us a step", "GB/s", "of memory", "TFLOP/s",
              "x grouped_mm", "us with Python", "timed by", "from eager"]  # fmt: skip
    note_text = ""
    if memory:
        note_text = (f"Device memory: a copy {memory['copy_gb_s']:.0f} GB/s (read and written),"
                f" a sum {memory['read_gb_s']:.0f} GB/s.\n\n")  # fmt: skip
    checked = values(rows, "kernels", "sanitizer").get("summary")
    after = f"\n\ncompute-sanitizer, small steps: {checked}" if checked else ""
    return f"## Kernels\n\n{note_text}{table(header, rows_shown)}{after}"


def _models(rows: Rows, smoke: bool) -> str:
    each = [_model(rows, name, smoke) for name in shapes.models(smoke)]
    if not any(each):
        return ""
    return "## Models\n\n" + "\n\n".join(filter(None, each))


def _model(rows: Rows, name: str, smoke: bool) -> str:
    def of(cell: str) -> dict[str, Any]:
        return values(rows, "models", f"{name}:{cell}")

    link, compute, rows_shown = of("link").get("gb_s"), of("tier 100%").get("token_ms"), []
    prefills: dict[str, dict[str, float]] = {}
    for kind, run in of("transformers").items():
        rows_shown.append(
            [f"transformers {kind}, all resident", f"{run['token_ms']:.2f}", *[""] * 7]
        )
        if "prefill" in run:
            prefills[f"transformers {kind}"] = run["prefill"]
    for cell in shapes.cells("models", smoke):
        model, _, what = cell.partition(":")
        run = of(what)
        if model != name or not run or what.split()[0] not in ("tier", "copies", "co-compute"):
            continue
        moved = run["bytes_a_token"] / link / 1e6 if link and "bytes_a_token" in run else None
        floor = max(compute, moved) if compute is not None and moved is not None else None
        rows_shown.append([
            what, f"{run['token_ms']:.2f}", _text(floor), _text(moved),
            f"{run['token_ms'] / floor:.2f}" if floor else "", f"{run['hits']:.1%}",
            *(_text(run.get(key)) for key in ("ids_ms", "launches_ms", "stalls_ms")),
        ])  # fmt: skip
        if "prefill" in run:
            prefills[what] = run["prefill"]
    if not rows_shown:
        return ""
    header = ["", "ms a token", "floor", "bytes / link", "x floor", "hits", "ids ms",
              "launches ms", "stalls ms"]  # fmt: skip
    parts = [f"### {name}"]
    if link:
        small, kernel = (of("link").get(f"{name}_gb_s") for name in ("small", "kernel"))
        text = f"A plain copy from pinned memory: {link:.1f} GB/s."
        if small is not None and kernel is not None:
            text += f" Of 32 MiB: {small:.1f}; in 16 parts by a kernel that reads it: {kernel:.1f}."
        parts.append(text)
    parts.append(table(header, rows_shown))
    if prefills:
        blocks = list(next(iter(prefills.values())))
        lines = [
            [what, *(f"{run.get(b, 0):.0f}" for b in blocks)] for what, run in prefills.items()
        ]
        parts.append(table(["prompt, tokens a second", *(f"blocks of {b}" for b in blocks)], lines))
    return "\n\n".join(parts)


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _demo(rows: Rows) -> str:
    runs = {run: rows_shown for run in shapes.RUNS if (rows_shown := values(rows, "demo", run))}
    if not runs:
        return ""
    first, text = next((name, run["text"]) for name, run in runs.items())
    lines = []
    for name, run in runs.items():
        alike = next((i for i, (a, b) in enumerate(zip(text, run["text"], strict=False)) if a != b),
                     min(len(text), len(run["text"])))  # fmt: skip
        same = "the same" if run["text"] == text else f"differs after {alike} characters"
        lines.append([name, f"{run['seconds']:.1f}", same])
    return f"## Demo\n\n{table(['device, kernels', 's', f'text compared with {first}'], lines)}"


def _missing(rows: Rows) -> str:
    lines = [f"- {part}, {cell}: {row['status']}: {row.get('reason', '')}"
             for (part, cell), row in rows.items() if row["status"] != DONE]  # fmt: skip
    return "## Not in the tables\n\n" + ("\n".join(lines) if lines else "Nothing is missing.")


def plots(rows: Rows, out: Path, smoke: bool) -> None:
    """kernels.png and models.png, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(shapes.kernels(smoke))
    tokens = shapes.tokens(smoke)
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        for encoding in (shapes.GROUPED, *shapes.ENCODINGS):
            rows_shown = values(rows, "kernels", f"{name}:{encoding}").get("rows", [])
            if rows_shown:
                axis.plot([r["tokens"] for r in rows_shown], [r["us"] for r in rows_shown], "o-",
                          label=encoding)  # fmt: skip
        axis.set(title=name, xlabel="tokens", ylabel="us a step", xscale="log", yscale="log")
        axis.set_xticks(tokens, [str(t) for t in tokens])
        if axis.lines:
            axis.legend(fontsize=7)
    _save(pyplot, figure, out / "kernels.png", any(axis.lines for axis in axes[0]))
    figure, axes = pyplot.subplots(1, len(shapes.models(smoke)), figsize=(9, 4), squeeze=False)
    for name, axis in zip(shapes.models(smoke), axes[0], strict=True):
        for kind in ("tier", "copies"):
            rows_shown = [(float(s.rstrip("%")), run["token_ms"]) for s in shapes.SHARES
                     if (run := values(rows, "models", f"{name}:{kind} {s}"))]  # fmt: skip
            if rows_shown:
                axis.plot(*zip(*rows_shown, strict=True), "o-", label=kind)
        axis.set(title=name, xlabel="experts on the GPU, %", ylabel="ms a token", ylim=(0, None))
        if axis.lines:
            axis.legend()
    _save(pyplot, figure, out / "models.png", any(axis.lines for axis in axes[0]))


def _save(pyplot: Any, figure: Any, path: Path, anything: bool) -> None:
    if anything:
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    pyplot.close(figure)
