"""`greenroom run MODEL [PROMPT]`: answer a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from greenroom.cli.options import add_options, take
from greenroom.config import LoadConfig, SamplingConfig, show_bytes
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.hf.generate import Answer
    from greenroom.runtime.stats import Stats

HELP = "answer a prompt with a model that need not fit in memory"


def add_to(commands: Any) -> None:
    parser = commands.add_parser("run", help=HELP, description=HELP)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or `demo`")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="read from stdin if not given")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--live", action="store_true", help="show hits and bytes while it runs")
    add_options(parser, SamplingConfig, "sampling")
    add_options(parser, LoadConfig, "memory and machine")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> None:
    load, sampling = take(args, LoadConfig), take(args, SamplingConfig)
    prompt = args.prompt if args.prompt is not None else _from_stdin()

    from greenroom.cli.live import LiveLine
    from greenroom.hf.generate import answer
    from greenroom.hf.load import context_of, load_with
    from greenroom.hf.report import startup_line

    model, tokenizer = load_with(args.model, load)
    try:
        print(startup_line(args.model, model, load), file=sys.stderr, flush=True)
        greenroom, context = model.greenroom, context_of(model, load.context)
        greenroom.reset_stats()
        with LiveLine(greenroom.stats, shown=args.live and not args.json) as live:

            def show(text: str) -> None:
                if not args.json:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                live.update()

            result = answer(
                model, tokenizer, prompt, sampling, raw=args.raw, context=context, on_text=show
            )
        stats = greenroom.stats()
    finally:
        model.greenroom.detach()
    if args.json:
        print(json.dumps(as_json(result, stats)))
    else:
        print()
        print(closing_line(result, stats), file=sys.stderr)


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt: give one as an argument or on standard input")
    return sys.stdin.read()


def as_json(result: Answer, stats: Stats) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "ttft_s": result.ttft_s,
        "tpot_s": result.tpot_s,
        "tpot_p95_s": result.tpot_p95_s,
        "tokens_per_s": result.tokens_per_s,
        "capacity": stats.capacity,
        "expert_requests": stats.expert_requests,
        "expert_hits": stats.expert_hits,
        "hit_ratio": stats.hit_ratio,
        "bytes_read": stats.bytes_read,
        "stall_s": stats.stall_s,
        "peak_rss_bytes": stats.peak_rss_bytes,
        "budget_bytes": stats.budget_bytes,
        "policy": stats.policy,
        "kernels": stats.kernels,
    }


def closing_line(result: Answer, stats: Stats) -> str:
    """One line: tokens, times, hits, bytes, memory."""
    parts = [f"{result.prompt_tokens} + {result.new_tokens} tokens", f"TTFT {result.ttft_s:.2f} s"]
    if result.gaps:
        parts.append(f"TPOT {_ms(result.tpot_s)} (p95 {_ms(result.tpot_p95_s)})")
        parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    parts.append(f"hit ratio {stats.hit_ratio:.1%}")
    total = result.prompt_tokens + result.new_tokens
    parts.append(f"{show_bytes(stats.bytes_read / total)} read a token")
    of = f" of {show_bytes(stats.budget_bytes)}" if stats.budget_bytes else ""
    parts.append(f"peak {show_bytes(stats.peak_rss_bytes)}{of}")
    if result.cut_short:
        parts.append("stopped where --context ends")
    return " · ".join(parts)


def _ms(seconds: float | None) -> str:
    assert seconds is not None
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
