"""Shared helpers of the benchmarks: the machine, one run of an engine, ratios, tables."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from memlimit import run_limited

os.environ.setdefault("GREENROOM_LEARNED", "off")  # every run starts cold, unless it says so
WORKER = Path(__file__).with_name("worker.py")
Result = dict[str, Any]


def machine() -> str:
    """Describe the machine in one line; the load average shows other programs' work."""
    import torch
    import transformers

    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = [f for f in ("avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{f}\b", info)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{model[1] if model else platform.processor()}, {os.cpu_count()} cores"
        f" ({' '.join(flags) or 'no avx512'}), {memory / 1e9:.0f} GB;"
        f" torch {torch.__version__}, transformers {transformers.__version__}; load {load}"
    )


def model_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def run_worker(
    engine: str, folder: Path, limit_bytes: int = 0, timeout_s: float = 900, **options: Any
) -> Result:
    """Run worker.py once, cold, in a process and memory cgroup of its own.

    The result has the keys of worker.py's JSON and the fields of memlimit.Measured; it has `error`
    if the run failed.
    """
    command = [sys.executable, str(WORKER), engine, str(folder)]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    measured, out, err = run_limited(command, limit_bytes, [folder], timeout_s)
    result: Result = {"engine": engine, "model": folder.name, **asdict(measured)}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if measured.returncode == 0 and lines:
        result.update(json.loads(lines[-1]))
    else:
        last = err.strip().splitlines()[-1:] or ["no output"]
        result["error"] = "killed: out of memory or time" if measured.killed else last[0][:300]
    return result


def run_llama_bench(
    program: Path,
    gguf: Path,
    limit_bytes: int = 0,
    threads: int = 2,
    prompt: int = 128,
    tokens: int = 16,
    repeats: int = 1,
    env: dict[str, str] | None = None,
    timeout_s: float = 900,
    repack: bool = True,
    engine: str = "llama.cpp",
) -> Result:
    """One cold run of llama.cpp's llama-bench: prefill and decode as worker.py reports them.

    `engine` names the result of another engine's llama-bench, such as ik_llama.cpp's.

    With `repack`, its default, it copies some types (Q4_0) to memory of its own in another order,
    which is faster, and is killed where there is no room for that. Without it, weights stay mapped.

    llama-bench gives one time for all tokens of a repetition, so its time a token is a mean.
    """
    flags = f"-t {threads} -p {prompt} -n {tokens} -r {repeats} -o json".split()
    if repeats == 1:
        flags += without_warmup(program)
    if not repack:
        flags += without_repacking(program)
    command = [str(program), "-m", str(gguf), *flags]
    measured, out, err = run_limited(command, limit_bytes, [gguf], timeout_s, env)
    result: Result = {"engine": engine, "model": gguf.stem, **asdict(measured)}
    if measured.returncode != 0:
        last = err.strip().splitlines()[-1:] or ["no output"]
        result["error"] = "killed: out of memory or time" if measured.killed else last[0][:300]
        return result
    for entry in json.loads(out[out.index("[") :]):
        seconds = [nanoseconds / 1e9 for nanoseconds in entry["samples_ns"]]
        if entry["n_prompt"]:
            result["prefill_s"] = seconds
        else:
            result["token_s"] = [s / tokens for s in seconds for _ in range(tokens)]
    return result


def without_warmup(program: Path) -> tuple[str, ...]:
    """The options with which a llama-bench leaves out the run before the first repetition.

    That of ik_llama.cpp has `--warmup <0|1>`.
    """
    return ("--warmup", "0") if "--warmup" in help_of(program) else ("--no-warmup",)


def without_repacking(program: Path) -> tuple[str, ...]:
    """The options with which a llama-bench maps the weights, and leaves them as they are.

    Older versions do so where `-ot` names the plain kind of buffer.
    """
    if "--repack" in help_of(program):
        return "--load-mode", "mmap", "--repack", "0"
    return "-ot", ".*=CPU"


@cache
def help_of(program: Path) -> str:
    """What a program prints with --help."""
    command = [str(program), "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def decode_rate(result: Result) -> float:
    """Decoded tokens a second: the number of tokens over their total time."""
    return len(result["token_s"]) / sum(result["token_s"])


def prefill_rate(result: Result) -> float:
    """Prompt tokens a second of the median prefill."""
    return result["prompt_tokens"] / statistics.median(result["prefill_s"])


def ratio(pairs: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, float, float]:
    """(ratio, low, high): geometric mean of a / b over the pairs, and its 95 % interval.

    The interval resamples the pairs. With one pair there is no interval: low = high = ratio.
    """
    logs = [math.log(a / b) for a, b in pairs]
    draw = random.Random(0)
    resampled_means = sorted(
        statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(draws)
    )
    low, high = resampled_means[int(0.025 * draws)], resampled_means[int(0.975 * draws)]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def show_ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """`12.3 (10.1 to 14.0)`; `-` without pairs."""
    if not pairs:
        return "-"
    middle, low, high = ratio(pairs)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})" if len(pairs) > 1 else f"{middle:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def median_of(results: Iterable[Result], value: Callable[[Result], float]) -> float | None:
    """Median of a value over the runs without an error; None if there is none."""
    values = [value(result) for result in results if "error" not in result]
    return statistics.median(values) if values else None


def note(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def greenroom_program() -> list[str]:
    """The command `greenroom` of this interpreter's environment."""
    program_path = Path(sys.executable).with_name("greenroom")
    if program_path.exists():
        return [str(program_path)]
    return [sys.executable, "-c", "import sys; from greenroom.cli import main; sys.exit(main())"]


def commit() -> str:
    """The measured commit, with a + if the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    own_folder = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=own_folder, check=False)
    return done.stdout.strip() or "unknown"
