"""`greenroom verify MODEL`: prove that nothing changes when experts stay on disk.

With `--quality TEXT`: what a pack, or another version of a model, loses against its original, or
what quantised keys and values or other kernels cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.options.fields import add_model, add_options, given
from greenroom.cli.options.parser import Parser
from greenroom.cli.run import text_of
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress, model_progress, quiet
from greenroom.config import INEXACT, LoadConfig, flag, options_in
from greenroom.errors import UsageError, VerifyError

if TYPE_CHECKING:
    from greenroom.hf.check.verify import Verdict

HELP = "prove that the output is the full model's, bit for bit; or measure a pack's quality"
TOKENS = 24  # to compare
PROOF = ("prompt", "layers", "max_new_tokens")  # options that --quality has no use for
LESSER = tuple(each.name for each in options_in(LoadConfig) if each.metadata["group"] == INEXACT)
QUALITY = ("against", "tokens", "kv", *LESSER)  # and those that are for it alone
FIELDS = (
    "identical", "max_logit_difference", "grouped_mm_difference", "tokens_compared", "kernels",
)  # fmt: skip
TEXTS = {
    "kernels": "judge these beside transformers' eager",
    "kv": "keep keys and values so; like --kernels, of the model alone and not of"
    " its original (default: %(default)s)",
}


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--cache", default="10%", metavar="SIZE",
        help="the expert cache: 25%% of the experts, or 2GiB (default: 10%%)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N",
        help=f"greedy tokens to compare (default: {TOKENS})",
    )  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what to begin with (default: a sentence)")
    add_options(parser, LoadConfig, "options", names=("dtype", "kernels"), texts=TEXTS)
    parser.add_argument(
        "--layers", action="store_true", help="compare layer by layer even if the model would fit"
    )
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--quality", metavar="FILE", type=Path,
        help="instead, KL divergence from the original and perplexity on this text",
    )  # fmt: skip
    quality.add_argument(
        "--against", metavar="MODEL", help="the original (default: what a pack was made from)"
    )
    quality.add_argument(
        "--tokens", type=int, metavar="N", help="of the text, take so many (default: all)"
    )
    add_options(parser, LoadConfig, "quality", names=("kv", *LESSER), texts=TEXTS)
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    wrong = PROOF if args.quality is not None else QUALITY
    own = {
        name for name in (*PROOF, "against", "tokens") if getattr(args, name) not in (None, False)
    }
    if name := next((each for each in wrong if each in own | given(args).keys()), None):
        which = "does not go with" if args.quality is not None else "is for"
        raise UsageError(f"{flag(name)} {which} --quality")
    if args.tokens is not None and args.tokens < 2:
        raise UsageError(f"--tokens must be at least 2, got {args.tokens}")
    if args.prompt is not None:
        text_of(args.prompt)
    with model_progress(args.model) as progress:
        quiet(progress)
        work = _quality if args.quality is not None else _proof
        work(args, progress)


def _said(args: argparse.Namespace, progress: Progress) -> Callable[[str], None]:
    """What is given to functions that report lines: they are printed above the progress."""

    def say(line: str) -> None:
        if not args.json:
            progress.clear()
            print(line, flush=True)
        progress.say(f"verifying {args.model}")

    return say


def _quality(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.cli.terminal.summary import inexact_line
    from greenroom.hf.check.loss import store_loss
    from greenroom.hf.check.quality import quality, text_in

    lesser = {name: value for name, value in given(args).items() if name in LESSER}
    found = quality(
        args.model,
        text_in(args.quality),
        args.against,
        cache=args.cache,
        dtype=args.dtype,
        tokens=args.tokens,
        kv=args.kv,
        kernels=args.kernels,
        lesser=lesser,
        say=_said(args, progress),
    )
    progress.clear()
    if args.against is None and lesser:
        store_loss(LoadConfig(**lesser), found)
    if args.json:
        print(json.dumps(asdict(found)))
        return
    print(
        f"KL divergence from {found.original}: mean {found.kl_mean:.3g}, p99 {found.kl_p99:.3g}"
        f" nats, over {found.tokens} tokens; the same token is likeliest in {found.same_top:.1%}"
        f"\nperplexity {found.perplexity:.6g}, the original's {found.original_perplexity:.6g}"
    )
    if found.lesser is not None:
        print(f"inexact: {inexact_line(found.lesser)}")


def _proof(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.hf.check.verify import PROMPT, verify

    verdict = verify(
        args.model,
        args.cache,
        tokens=TOKENS if args.max_new_tokens is None else args.max_new_tokens,
        prompt=PROMPT if args.prompt is None else args.prompt,
        dtype=args.dtype,
        kernels=args.kernels,
        layers=True if args.layers else None,
        say=_said(args, progress),
    )
    progress.clear()
    failed = [what for what, passed in verdict.checks if not passed]
    if args.json:
        found = {name: getattr(verdict, name) for name in FIELDS}
        found["compared"] = "logits" if verdict.entire_model else "layers"
        found["layer_difference"], found["grouped_mm_layer_difference"] = verdict.layer_differences
        print(json.dumps({**found, "layers_as_stored": verdict.as_stored, "failed": failed}))
    else:
        print(_difference(verdict))
    if failed:
        raise VerifyError(f"{len(failed)} of {len(verdict.checks)} comparisons failed")
    if not verdict.near:
        raise VerifyError(
            f"the {verdict.kernels} kernels are further from eager than twice grouped_mm"
        )
    if not args.json:
        print(
            f"identical over {verdict.tokens_compared} tokens: eager kernels to transformers'"
            f" eager, {verdict.kernels} kernels to themselves with any cache"
        )


def _difference(verdict: Verdict) -> str:
    """How far the judged kernels are from transformers' eager, and its grouped_mm."""
    ours, grouped_mm = verdict.layer_differences
    stored = " on weights as stored" if verdict.as_stored else ""
    line = (
        f"{verdict.kernels} kernels, largest difference from transformers' eager{stored}:"
        f" {ours:.3g} in a layer's output (transformers' grouped_mm: {grouped_mm:.3g})"
    )
    if not verdict.entire_model:
        return line
    return (
        f"{line}, {verdict.max_logit_difference:.3g} in logits"
        f" ({verdict.grouped_mm_difference:.3g})"
    )
