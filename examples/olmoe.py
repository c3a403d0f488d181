"""OLMoE-1B-7B end to end: download, verify, run at several budgets, compare, write a report.

    python examples/olmoe.py -o report                        # downloads 14 GB
    python examples/olmoe.py FOLDER -o report --tokens 32     # offline, any MoE checkpoint
    python examples/olmoe.py FOLDER -o report --llama-bench llama-bench --gguf olmoe-bf16.gguf

`examples/olmoe.md` says what is measured, and how. Everything is done by Greenroom's command line;
every measurement is a process of its own, and engines take turns. Leaves `report.md` and
`report.json` in the folder of `-o`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "allenai/OLMoE-1B-7B-0924"
PROMPT = "The history of the theatre begins with"
MEMLIMIT = Path(__file__).resolve().parents[1] / "benchmarks" / "memlimit.py"
GIB = 1 << 30
ROOM = 0.95  # of a limit is Greenroom's budget: the rest is the kernel's own

Numbers = dict[str, Any]


class Unavailable(Exception):
    """This cannot be measured here; the message says why."""


@dataclass
class Case:
    """Something that is measured `repeat` times, in turn with the others."""

    name: str
    memory: str
    measure: Callable[[], Numbers]
    found: list[Numbers] = field(default_factory=list)
    skipped: str = ""

    def once(self) -> None:
        if self.skipped:
            return
        try:
            self.found.append(self.measure())
        except Unavailable as why:
            self.skipped = str(why)
            say(f"skipped: {self.name}, {self.memory}: {why}")

    def median(self, name: str) -> float | None:
        values = [found[name] for found in self.found if found.get(name) is not None]
        return statistics.median(values) if values else None


def main() -> int:
    args = arguments()
    if args.engine is not None:
        print(json.dumps(transformers(args)))
        return 0
    folder = resolve(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    verdict = None if args.no_verify else verify(folder, args)
    cases = cases_of(folder, args)
    for turn in range(args.repeat):
        for case in cases:
            say(f"{turn + 1} of {args.repeat}: {case.name}, {case.memory}")
            case.once()
    write(folder, args, verdict, cases)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="OLMoE-1B-7B end to end, with a report")
    add = parser.add_argument
    add("model", nargs="?", default=MODEL, help="a folder, or a hub id (default: %(default)s)")
    add("-o", "--output", type=Path, default=Path("olmoe-report"), help="folder of the report")
    add("--budgets", default="100%,50%,25%,12.5%", help="expert caches (default: %(default)s)")
    add("--tokens", type=int, default=64, help="new tokens of a run (default: %(default)s)")
    add("--repeat", type=int, default=3, help="turns (default: %(default)s)")
    add("--prompt", default=PROMPT, help="what is continued (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="of every engine (default: all)")
    add("--no-verify", action="store_true", help="do not verify first")
    add("--no-transformers", action="store_true", help="do not measure transformers")
    add("--llama-bench", type=Path, metavar="PROGRAM", help="llama.cpp's, to compare with")
    add("--gguf", type=Path, metavar="FILE", help="the same model for llama.cpp")
    add("--limit", default="50%", metavar="SHARE",
        help="of the model's size: memory of the comparison in little; 0 for none")  # fmt: skip
    add("--limited-tokens", type=int, default=8, help="new tokens there (default: %(default)s)")
    add("--engine", choices=["transformers"], help=argparse.SUPPRESS)  # a process of its own
    args = parser.parse_args()
    if (args.llama_bench is None) != (args.gguf is None):
        parser.error("--llama-bench and --gguf go together")
    for path in (args.llama_bench, args.gguf):
        if path is not None and not path.is_file():
            parser.error(f"{path} is not a file")
    for share in [*args.budgets.split(","), args.limit]:
        if not 0 <= share_of(share) <= 1:
            parser.error(f"{share!r} is no share: write 25%")
    for name in ("tokens", "limited_tokens", "repeat"):
        if getattr(args, name) < 2 - (name == "repeat"):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is too few")
    return args


def share_of(text: str) -> float:
    """`25%` is 0.25; -1 where it is no share."""
    try:
        return float(text.strip().removesuffix("%")) / 100
    except ValueError:
        return -1.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(line: str) -> Any:
    say(f"olmoe: {line}")
    raise SystemExit(2)


# ---- the model


def resolve(model: str) -> Path:
    """The model's folder; one that is not here is downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    say(f"downloading {model}")
    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        return fail(f"{model} is no folder, and could not be downloaded: {reason}")  # type: ignore[no-any-return]


def size_of(folder: Path) -> int:
    """Bytes of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def available() -> int:
    """Bytes of memory that a process could have now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits(nbytes: float) -> None:
    if nbytes > 0.9 * available():
        raise Unavailable(
            f"takes {nbytes / GIB:.1f} GiB, {available() / GIB:.1f} GiB are available"
        )


# ---- what is run


def process(command: Sequence[object]) -> tuple[int, str, str]:
    """(exit code, output, errors) of a command."""
    env = {**os.environ, "GREENROOM_LEARNED": "off"}  # no run begins with what another has learned
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, env=env)
    return done.returncode, done.stdout, done.stderr


def greenroom(*words: object) -> list[object]:
    return [sys.executable, "-m", "greenroom", *words]


def last(text: str) -> str:
    """What a program said last: its error."""
    return (text.strip().splitlines() or ["no message"])[-1]


def verify(folder: Path, args: argparse.Namespace) -> Numbers:
    """`greenroom verify`; ends here where the output is not the full model's."""
    say("verifying")
    begin = time.perf_counter()
    code, out, err = process(
        greenroom("verify", folder, "--json", "--max-new-tokens", min(args.tokens, 24))
    )
    if code:
        fail(f"greenroom verify: {last(err)}")
    return {**json.loads(out), "seconds": time.perf_counter() - begin}


def run_command(folder: Path, args: argparse.Namespace, tokens: int, *size: object) -> list[object]:
    return greenroom(
        "run", folder, args.prompt, "--raw", "--json", "--temperature", 0, "--device", "cpu",
        "--max-new-tokens", tokens, "--threads", args.threads, *size,
    )  # fmt: skip


def cached(folder: Path, args: argparse.Namespace, share: str) -> Numbers:
    """Greenroom with so many of the experts in slots."""
    fits(size_of(folder) * share_of(share) + GIB)
    code, out, err = process(run_command(folder, args, args.tokens, "--cache", share))
    if code:
        raise Unavailable(last(err))
    return numbers(out)


def numbers(out: str) -> Numbers:
    found: Numbers = json.loads(out.splitlines()[0])
    found["bytes_a_token"] = found["bytes_read"] / (found["prompt_tokens"] + found["new_tokens"])
    return found


def in_process(folder: Path, args: argparse.Namespace) -> Numbers:
    """transformers with everything in memory."""
    fits(1.1 * size_of(folder) + GIB)
    code, out, err = process(
        [sys.executable, Path(__file__).resolve(), folder, "--engine", "transformers",
         "--prompt", args.prompt, "--tokens", args.tokens, "--threads", args.threads]
    )  # fmt: skip
    if code:
        raise Unavailable(last(err))
    found: Numbers = json.loads(out.splitlines()[-1])
    return found


def transformers(args: argparse.Namespace) -> Numbers:
    """The same prompt and as many tokens, greedily, by transformers itself."""
    import resource

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    class Times(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, value: Any) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None: ...

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    ids = tokenizer(args.prompt, return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=2, do_sample=False)
    times, begin = Times(), time.perf_counter()
    with torch.inference_mode():
        answer = model.generate(ids, max_new_tokens=args.tokens, do_sample=False, streamer=times)
    gaps = [b - a for a, b in zip(times.at[1:], times.at[2:], strict=False)]  # first: the prompt
    return {
        "token_ids": answer[0, ids.shape[1] :].tolist(),
        "ttft_s": times.at[1] - begin,
        "tpot_s": statistics.median(gaps) if gaps else None,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# ---- llama.cpp, and little memory


def llama_command(args: argparse.Namespace, tokens: int) -> list[object]:
    return [args.llama_bench, "-m", args.gguf, "-t", args.threads, "-p", 0, "-n", tokens,
            "-r", 1, "-o", "json"]  # fmt: skip


def llama(args: argparse.Namespace) -> Numbers:
    """llama-bench's decoding of random tokens, everything in memory."""
    fits(1.1 * args.gguf.stat().st_size)
    code, out, err = process(llama_command(args, args.tokens))
    if code:
        raise Unavailable(last(err))
    return decoded(out)


def decoded(out: str) -> Numbers:
    (row,) = json.JSONDecoder().raw_decode(out.lstrip())[0]
    return {"tpot_s": 1 / row["avg_ts"], "type": row.get("model_type")}


def limited(command: list[object], nbytes: int, cold: Path) -> tuple[str, Numbers]:
    """A command's output, run in a cgroup of so many bytes with a cold page cache."""
    if not MEMLIMIT.is_file():
        raise Unavailable(f"{MEMLIMIT} is not there: run this from a checkout")
    code, out, err = process([sys.executable, MEMLIMIT, nbytes, cold, "--", *command])
    if code:
        raise Unavailable(last(err))
    *before, line = out.strip().splitlines()
    measured: Numbers = json.loads(line)
    if measured["returncode"]:
        killed = "was killed for want of memory" if measured["killed"] else last(err)
        raise Unavailable(killed)
    return "\n".join(before), measured


def greenroom_limited(folder: Path, args: argparse.Namespace, nbytes: int) -> Numbers:
    command = run_command(folder, args, args.limited_tokens, "--memory", int(ROOM * nbytes))
    out, measured = limited(command, nbytes, folder)
    return {**numbers(out), "cgroup": measured, "peak_rss_bytes": measured["peak_bytes"]}


def llama_limited(args: argparse.Namespace, nbytes: int) -> Numbers:
    command = [*llama_command(args, args.limited_tokens), "--no-warmup"]
    out, measured = limited(command, nbytes, args.gguf)
    return {**decoded(out), "cgroup": measured, "peak_rss_bytes": measured["peak_bytes"]}


def cases_of(folder: Path, args: argparse.Namespace) -> list[Case]:
    """All that is to be measured; whatever cannot be is skipped with a message in its turn."""
    cases = [
        Case(
            "Greenroom", f"{share} of the experts", lambda share=share: cached(folder, args, share)
        )  # type: ignore[misc]
        for share in args.budgets.split(",")
    ]
    if not args.no_transformers:
        cases.append(Case("transformers", "everything", lambda: in_process(folder, args)))
    if args.llama_bench is not None:
        cases.append(Case("llama.cpp", "everything", lambda: llama(args)))
    nbytes = int(size_of(folder) * share_of(args.limit))
    if nbytes:
        memory = f"{nbytes / GIB:.2g} GiB in all"
        cases.append(Case("Greenroom", memory, lambda: greenroom_limited(folder, args, nbytes)))
        if args.llama_bench is not None:
            cases.append(Case("llama.cpp", memory, lambda: llama_limited(args, nbytes)))
    return cases


# ---- the report


def write(
    folder: Path, args: argparse.Namespace, verdict: Numbers | None, cases: list[Case]
) -> None:
    """`report.md` for people, `report.json` with every number."""
    facts = {
        "model": args.model,
        "bytes": size_of(folder),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "memory": available(),
                    "system": platform.platform()},
        "versions": versions(),
        "command": ["python", *sys.argv],
        "verify": verdict,
        "cases": [
            {"engine": c.name, "memory": c.memory, "skipped": c.skipped, "runs": c.found}
            for c in cases
        ],
    }  # fmt: skip
    for name, text in (("json", json.dumps(facts, indent=1)), ("md", page(facts, verdict, cases))):
        path, beside = args.output / f"report.{name}", args.output / f".report.{name}.part"
        beside.write_text(text + "\n")
        beside.replace(path)
        print(path)


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("greenroom", "torch", "transformers")}


def page(facts: Numbers, verdict: Numbers | None, cases: list[Case]) -> str:
    machine = facts["machine"]
    lines = [
        f"# {facts['model']}",
        "",
        f"{facts['bytes'] / GIB:.3g} GiB of weights, on {machine['processor']},"
        f" {machine['cores']} cores, {machine['memory'] / GIB:.3g} GiB of memory available.",
        ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".",
        "",
        "## Verified",
        "",
        verified(verdict),
        "",
        "## Measured",
        "",
        "Medians of the runs that were made in turn.",
        "",
        "| engine | memory | tokens/s | TPOT | TTFT | hits | read a token | peak memory |",
        "|---|---|---|---|---|---|---|---|",
        *[row(case) for case in cases],
        "",
        same_tokens(cases),
        "",
        f"Again: `{shlex.join(facts['command'])}`",
    ]
    return "\n".join(lines)


def verified(verdict: Numbers | None) -> str:
    if verdict is None:
        return "Not verified: `--no-verify`."
    return (
        f"`greenroom verify`: identical to transformers' eager experts over"
        f" {verdict['tokens_compared']} tokens ({verdict['compared']} compared,"
        f" {verdict['seconds']:.0f} s). The {verdict['kernels']} kernels are"
        f" {verdict['layer_difference']:.2g} from eager in a layer's output, transformers' own"
        f" grouped_mm {verdict['grouped_mm_layer_difference']:.2g}."
    )


def row(case: Case) -> str:
    if case.skipped:
        return f"| {case.name} | {case.memory} | skipped: {case.skipped} | | | | | |"

    def cell(name: str, show: Callable[[float], str]) -> str:
        value = case.median(name)
        return "-" if value is None else show(value)

    cells = [
        cell("tpot_s", lambda s: f"{1 / s:.3g}"),
        cell("tpot_s", lambda s: f"{s * 1e3:.3g} ms"),
        cell("ttft_s", lambda s: f"{s:.2f} s"),
        cell("hit_ratio", lambda share: f"{share:.1%}"),
        cell("bytes_a_token", lambda n: f"{n / (1 << 20):.3g} MiB"),
        cell("peak_rss_bytes", lambda n: f"{n / GIB:.3g} GiB"),
    ]
    return f"| {case.name} | {case.memory} | {' | '.join(cells)} |"


def same_tokens(cases: list[Case]) -> str:
    """Whether Greenroom said the same at every size, and how far transformers agrees."""
    said = [found["token_ids"] for case in cases if case.name == "Greenroom"
            for found in case.found if "cgroup" not in found]  # fmt: skip
    theirs = [c.found[0]["token_ids"] for c in cases if c.name == "transformers" and c.found]
    if not said:
        return "Greenroom ran at none of these sizes."
    alike = all(each == said[0] for each in said)
    line = (
        f"Greenroom's {len(said)} runs gave the same {len(said[0])} tokens at every size."
        if alike
        else "**Greenroom's runs gave different tokens**: report this as a bug."
    )
    if theirs:
        pairs = list(zip(said[0], theirs[0], strict=False))
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        line += (
            f" transformers' default kernels give the same first {common}"
            " (kernels round differently; `greenroom verify` compares like with like)."
        )
    return line


if __name__ == "__main__":
    sys.exit(main())
