"""One engine, one checkpoint, one process: load, prefill, decode; prints one line of JSON.

    python benchmarks/worker.py greenroom bench-data/moe1.7b-zipf1.0 --memory 1.6GiB

Engines: `greenroom`; `transformers` and `transformers:eager|grouped_mm|batched_mm` (everything in
memory); `accelerate` (transformers with weights left on disk, `--memory` is the bytes for them).
All of them answer the same seeded random tokens: a short warm-up, then `--repeats` times a prompt
of `--prompt` tokens and `--tokens` passes of one random token each. Random tokens, not sampled
ones, so that every engine is asked for the same work.

Prints: `prefill_s` (one a repeat), `token_s` (one a decode pass), `load_s`, `peak_rss_bytes`, and
for Greenroom its own counters over the decode passes alone (`decode`) and over all (`all`).
`--breakdown` adds where a decode pass spends its time (see breakdown.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def load(engine: str, folder: str, args: argparse.Namespace, scratch: str) -> Any:
    """Load the model with an engine; `scratch` is the folder for accelerate's offloaded weights."""
    if engine == "greenroom":
        import greenroom

        options: dict[str, Any] = json.loads(args.options)
        if args.memory is not None:
            options["memory"] = args.memory
        else:
            options["cache"] = args.cache
        return greenroom.load(folder, **options)[0]

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name, _, experts = engine.partition(":")
    options = {"experts_implementation": experts} if experts else {}
    if name == "accelerate":
        options.update(
            device_map="auto", max_memory={"cpu": int(args.memory)}, offload_folder=scratch
        )
    elif name != "transformers":
        raise SystemExit(
            f"unknown engine {engine!r}: use greenroom, accelerate, transformers or"
            " transformers:IMPLEMENTATION"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


class Passes:
    """Prefill and decode passes of a model with seeded random tokens."""

    def __init__(self, model: Any) -> None:
        self.model, self.draw = model, torch.Generator().manual_seed(1)
        self.vocabulary = model.config.vocab_size

    def _random(self, tokens: int) -> torch.Tensor:
        return torch.randint(2, self.vocabulary, (1, tokens), generator=self.draw)

    def prefill(self, tokens: int) -> float:
        """Seconds for a new prompt."""
        ids, start = self._random(tokens), time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - start
        self.cache = out.past_key_values
        return seconds

    def decode(self, tokens: int) -> list[float]:
        """Seconds of each pass of one token."""
        times = []
        for _ in range(tokens):
            ids, start = self._random(1), time.perf_counter()
            out = self.model(ids, past_key_values=self.cache, use_cache=True)
            times.append(time.perf_counter() - start)
            self.cache = out.past_key_values
        return times


def counters(model: Any) -> Counter[str]:
    """Greenroom's counters so far; empty for other engines."""
    if not hasattr(model, "greenroom"):
        return Counter()
    stats = model.greenroom.stats()
    names = ("expert_requests", "expert_hits", "bytes_read", "stall_s")
    return Counter({name: getattr(stats, name) for name in names})


def fill(passes: Passes, prompts: int = 12) -> None:
    """Fill the cache with prompts of 512 tokens, until one of them reads nothing."""
    for _ in range(prompts):
        before = counters(passes.model)["bytes_read"]
        passes.prefill(512)
        if counters(passes.model)["bytes_read"] == before:
            break


@torch.no_grad()
def measure(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    passes, decode, prefill = Passes(model), Counter[str](), Counter[str]()
    if args.memory is None and hasattr(model, "greenroom"):
        fill(passes, args.fill)
    passes.prefill(8)
    passes.decode(2)
    first = counters(model)
    prefill_s: list[float] = []
    token_s: list[float] = []
    cpu_s = 0.0
    for _ in range(args.repeats):
        before = counters(model)
        prefill_s.append(passes.prefill(args.prompt))
        prefill.update(counters(model))
        prefill.subtract(before)
        if args.memory is None:
            passes.prefill(1)  # llama-bench, too, decodes without the prompt that it has measured
        before, cpu = counters(model), time.process_time()
        token_s += passes.decode(args.tokens)
        cpu_s += time.process_time() - cpu
        decode.update(counters(model))
        decode.subtract(before)
    result: dict[str, Any] = {
        "prefill_s": prefill_s, "token_s": token_s, "token_cpu_s": cpu_s / max(1, len(token_s))
    }  # fmt: skip
    if hasattr(model, "greenroom"):
        last = counters(model)
        last.subtract(first)
        stats = model.greenroom.stats()
        result.update(decode=decode, prefill=prefill, all=last)
        for name in ("capacity", "experts", "policy", "kernels", "budget_bytes"):
            result[name] = getattr(stats, name)
    if args.breakdown:
        from breakdown import breakdown

        passes.prefill(args.prompt)
        result["breakdown"] = breakdown(model, lambda: passes.decode(args.tokens))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="time one engine on one checkpoint")
    parser.add_argument("engine")
    parser.add_argument("folder")
    parser.add_argument("--memory", help="budget; without it Greenroom takes --cache")
    parser.add_argument("--cache", default="100%", help="Greenroom's cache (100%%)")
    parser.add_argument("--options", default="{}", help="more options of greenroom.load, as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fill", type=int, default=12, help="prompts that fill the cache, at most")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scratch", help="folder for accelerate's offloaded weights")
    parser.add_argument("--breakdown", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    scratch = tempfile.mkdtemp(dir=args.scratch or str(Path(args.folder).parent))
    try:
        start = time.perf_counter()
        model = load(args.engine, args.folder, args, scratch)
        load_s = time.perf_counter() - start
        result = measure(model, args)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    placed = getattr(model, "hf_device_map", {})
    result.update(
        load_s=load_s,
        prompt_tokens=args.prompt,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        modules_on_disk=sum(str(place) == "disk" for place in placed.values()),
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
