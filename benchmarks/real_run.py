"""Download, verify, run and measure a model; print one block of Markdown for a public table.

    python benchmarks/real_run.py allenai/OLMoE-1B-7B-0924
    python benchmarks/real_run.py FOLDER --memory 8GiB --rounds 5

The first table has a row for docs/real-checkpoints.md. Each step is a command of Greenroom in a
process of its own. A step that fails ends the run; the block then has its message, and the exit
code is 1. A local model has no download, and its path is not shown.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from greenroom.config import show_bytes

PROMPT = "Explain in three sentences why the sky is blue."
HEADER = (
    "model", "memory", "tokens/s", "hit ratio", "verified", "Greenroom", "machine", "by", "date",
)  # fmt: skip


class StepError(Exception):
    """A command of Greenroom that failed, with the last line of its error."""


def run_command(name: str, model: str, *options: str) -> str:
    """Run a command of Greenroom on the model; return its standard output."""
    command = [sys.executable, "-m", "greenroom", name, model, *options]
    begin = time.monotonic()
    print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    print(f"{time.monotonic() - begin:.0f} s, exit code {done.returncode}", file=sys.stderr)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StepError(f"`greenroom {name}`: {lines[-1]}".replace(model, public_name(model)))
    return done.stdout


def is_local(model: str) -> bool:
    """Check that a model is the demo or has a path on this machine."""
    return model == "demo" or Path(model).expanduser().exists()


def public_name(model: str) -> str:
    """Return a model's name on the hub; a path is not shown."""
    return model if model == "demo" or not is_local(model) else "a local model"


def proof(verified: dict[str, Any]) -> str:
    """Describe what `greenroom verify` compared."""
    return (
        f"{verified['compared']} of {verified['tokens_compared']} tokens are transformers', bit for"
        f" bit (eager kernels); {verified['kernels']} kernels give the same bits with any cache"
    )


def share_of(text: str) -> dict[str, Any]:
    """Return the JSON object within the report of `greenroom bench --share`."""
    found = re.search(r"^```json\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise StepError("`greenroom bench --share`: the report has no JSON")
    return json.loads(found[1])


def table_row(
    model: str, verified: dict[str, Any], ran: dict[str, Any], bench: dict[str, Any]
) -> str:
    """Write the row of the table of real checkpoints; the name of who ran it is left open."""
    machine, system = bench["machine"], bench["systems"][0]
    memory = ran["budget_bytes"] or ran["peak_rss_bytes"]
    cells = (
        f"`{public_name(model)}`", show_bytes(memory), f"{system['tokens_per_s'][0]:.3g}",
        f"{system['hit_ratio'][0]:.1%}", verified["compared"], bench["greenroom"],
        f"{machine['cpu']}, {machine['cores']} cores, {show_bytes(machine['memory_bytes'])}", "",
        time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADER, ["---"] * len(HEADER), cells))


def block(args: argparse.Namespace) -> list[str]:
    """Run all steps; return the parts of the block."""
    model, load = args.model, []
    for option in ("memory", "cache"):
        if getattr(args, option):
            load += [f"--{option}", getattr(args, option)]
    parts = []
    if not is_local(model):
        pulled = json.loads(run_command("pull", model, "--json"))
        parts.append(f"**Download.** {show_bytes(pulled['nbytes'])} in {pulled['files']} files.")
    tokens = ["--max-new-tokens", str(args.tokens)]
    verified = json.loads(run_command("verify", model, "--json"))
    ran = json.loads(run_command("run", model, args.prompt, "--json", *tokens, *load))
    rounds = ["--tokens", str(args.tokens), "--rounds", str(args.rounds)]
    report = run_command("bench", model, "--share", *rounds, *load)
    answer = "\n".join(f"> {line}" for line in ran["text"].strip().splitlines()) or "> (no text)"
    return [
        table_row(model, verified, ran, share_of(report)), *parts,
        f"**Verify.** {proof(verified)}.",
        f"**Run.** {args.prompt}\n\n{answer}\n\n{ran['new_tokens']} tokens, TTFT"
        f" {ran['ttft_s']:.2f} s, {show_bytes(ran['peak_rss_bytes'])} at the peak.",
        report.strip(),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name on the hub, a folder, a GGUF file, or demo")
    parser.add_argument("--memory", help="limit of the process, as of `greenroom run`")
    parser.add_argument("--cache", help="size of the expert cache, instead")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of `greenroom bench`")
    args = parser.parse_args()
    try:
        print("\n\n".join(block(args)))
    except StepError as error:
        print(f"| model | failed |\n|---|---|\n| `{public_name(args.model)}` | {error} |")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
