"""`greenroom verify MODEL`: checks that output is the same when experts stay on disk.

With `--quality FILE` the command measures how much the output of a pack, another version of a
model, a quantised KV cache or other kernels differs from the original's. For a GGUF file alone it
measures how far the kernels, and ggml's arithmetic, are from exact products.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.options.fields import add_model, add_options, configured
from greenroom.cli.options.parser import Parser
from greenroom.cli.run import text_of
from greenroom.cli.terminal.files import add_json
from greenroom.cli.terminal.progress import Progress, model_progress, quiet
from greenroom.config import INEXACT, LoadConfig, flag, options_in
from greenroom.errors import UsageError, VerifyError

if TYPE_CHECKING:
    from greenroom.hf.check.kernel_quality import KernelQuality
    from greenroom.hf.check.verify import Verdict

HELP = "check that output equals the full model's, bit for bit; or measure a pack's quality"
TOKENS = 24  # to compare
PROOF = ("prompt", "layers", "max_new_tokens", "adapter")  # not for --quality
PROVEN = ("dtype", "kernels", "config", "adapter")  # options of loading that a comparison has
APPROXIMATE = tuple(
    each.name for each in options_in(LoadConfig) if each.metadata["group"] == INEXACT
)
QUALITY = ("against", "tokens", "kv", *APPROXIMATE)  # for --quality alone
FIELDS = (
    "identical", "max_logit_difference", "grouped_mm_difference", "tokens_compared", "kernels",
)  # fmt: skip
PRODUCTS = {
    "native": "default kernels",
    "precise": "--kernels precise",
    "ggml": "ggml's arithmetic, emulated",
}
TEXTS = {
    "kernels": "implementation of the experts' computation to check",
    "kv": "with --quality, format of the KV cache of MODEL; its original has an exact one (default:"
    " %(default)s)",
}


def add_to(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--cache", default="10%", metavar="SIZE",
        help="size of the expert cache: 25%% of the experts, or 2GiB (default: 10%%)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N",
        help=f"number of greedily generated tokens to compare (default: {TOKENS})",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the prompt to answer (default: a short sentence)"
    )
    add_options(parser, LoadConfig, "options", names=PROVEN, texts=TEXTS)
    parser.add_argument(
        "--layers",
        action="store_true",
        help="compare layer by layer, as is done anyway for a model that does not fit in memory",
    )
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--quality", metavar="FILE", type=Path,
        help="instead, measure perplexity and KL divergence from the original on the text in"
        " this file; for a GGUF file without --against, those of the default kernels, of --kernels"
        " precise and of ggml's arithmetic from exact products",
    )  # fmt: skip
    quality.add_argument(
        "--against",
        metavar="MODEL",
        help="with --quality, the original model to compare with (default: the one that the"
        " pack was"
        " made from)",
    )
    quality.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="with --quality, use only the first N tokens of the text (default: all)",
    )
    add_options(parser, LoadConfig, "quality", names=("kv", *APPROXIMATE), texts=TEXTS)
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    wrong = PROOF if args.quality is not None else QUALITY
    used = {
        name for name in (*PROOF, "against", "tokens") if getattr(args, name) not in (None, False)
    }
    if name := next((each for each in wrong if each in used | configured(args).keys()), None):
        which = (
            "has no effect with --quality: leave it out"
            if args.quality is not None
            else "has an effect only with --quality FILE"
        )
        raise UsageError(f"{flag(name)} {which}")
    if args.tokens is not None and args.tokens < 2:
        raise UsageError(f"--tokens must be at least 2, got {args.tokens}")
    if args.prompt is not None:
        text_of(args.prompt)
    with model_progress(args.model) as progress:
        quiet(progress)
        work = _quality if args.quality is not None else _proof
        work(args, progress)


def _reporter(args: argparse.Namespace, progress: Progress) -> Callable[[str], None]:
    """Return a callback that prints a line above the progress line, or nothing with --json."""

    def say(line: str) -> None:
        if not args.json:
            progress.clear()
            print(line, flush=True)
        progress.say(f"verifying {args.model}")

    return say


def _quality(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.hf.checkpoint.resolve import resolve

    changed = configured(args).keys() & {"kv", "kernels", *APPROXIMATE}
    if args.against is None and not changed and resolve(args.model).suffix == ".gguf":
        _kernel_quality(args, progress)
    else:
        _model_quality(args, progress)


def _kernel_quality(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.hf.check.kernel_quality import compare_kernels
    from greenroom.hf.check.quality import read_text

    measured = compare_kernels(
        args.model,
        read_text(args.quality),
        cache=args.cache,
        dtype=args.dtype,
        tokens=args.tokens,
        config=args.config,
        say=_reporter(args, progress),
    )
    progress.clear()
    print(json.dumps(asdict(measured)) if args.json else _kernel_table(measured))


def _kernel_table(measured: KernelQuality) -> str:
    """Return the distances of kernels and of ggml's arithmetic as a table, and what they mean."""
    from greenroom.sim.table import text_table

    header = ("", "KL mean", "KL p99", "same top token", "perplexity")
    rows = [("exact products", "", "", "", f"{measured.perplexity:.6g}")]
    rows += [
        (
            PRODUCTS[name], f"{each.kl_mean:.3g}", f"{each.kl_p99:.3g}", f"{each.same_top:.1%}",
            f"{each.perplexity:.6g}",
        )
        for name, each in measured.distances.items()
    ]  # fmt: skip
    lines = [f"distance from exact products, {measured.tokens} tokens; KL divergence in nats:"]
    lines.append(text_table(header, rows))
    *ours, ggml = measured.distances.items()
    if ggml[1].kl_mean > 0:
        shares = [
            f"{PRODUCTS[name]} {each.kl_mean / ggml[1].kl_mean:.2g} times" for name, each in ours
        ]
        lines.append(f"mean KL divergence beside that of ggml's arithmetic: {', '.join(shares)}")
    if measured.dtype != "float32":
        lines.append(f"the kernels also round hidden states to {measured.dtype}, ggml does not")
    if "precise" not in measured.distances:
        lines.append("no inputs are rounded to 8 bits: --kernels precise gives the same bits")
    return "\n".join(lines)


def _model_quality(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.cli.terminal.summary import inexact_line
    from greenroom.hf.check.loss import store_loss
    from greenroom.hf.check.quality import quality, read_text

    approximation = {name: value for name, value in configured(args).items() if name in APPROXIMATE}
    measured = quality(
        args.model,
        read_text(args.quality),
        args.against,
        cache=args.cache,
        dtype=args.dtype,
        tokens=args.tokens,
        kv=args.kv,
        kernels=args.kernels,
        approximation=approximation,
        config=args.config,
        say=_reporter(args, progress),
    )
    progress.clear()
    if args.against is None and approximation:
        store_loss(LoadConfig(**approximation), measured)
    if args.json:
        print(json.dumps(asdict(measured)))
        return
    print(
        f"KL divergence from {measured.original}: mean {measured.kl_mean:.3g}, p99"
        f" {measured.kl_p99:.3g}"
        f" nats, over {measured.tokens} tokens; the same most likely token in"
        f" {measured.same_top:.1%}"
        f"\nperplexity {measured.perplexity:.6g} (original: {measured.original_perplexity:.6g})"
    )
    if measured.approximated is not None:
        print(f"inexact: {inexact_line(measured.approximated)}")


def _proof(args: argparse.Namespace, progress: Progress) -> None:
    from greenroom.hf.check.verify import EIGHT_BITS_SHARE, PROMPT, verify

    verdict = verify(
        args.model,
        args.cache,
        tokens=TOKENS if args.max_new_tokens is None else args.max_new_tokens,
        prompt=PROMPT if args.prompt is None else args.prompt,
        dtype=args.dtype,
        kernels=args.kernels,
        layers=True if args.layers else None,
        config=args.config,
        adapter=args.adapter,
        say=_reporter(args, progress),
    )
    progress.clear()
    failed = [what for what, passed in verdict.checks if not passed]
    if args.json:
        fields = {name: getattr(verdict, name) for name in FIELDS}
        fields["compared"] = "logits" if verdict.entire_model else "layers"
        fields["layer_difference"], fields["grouped_mm_layer_difference"] = (
            verdict.layer_differences
        )
        fields["eight_bits"] = verdict.eight_bits
        print(json.dumps({**fields, "layers_as_stored": verdict.as_stored, "failed": failed}))
    else:
        print(_difference(verdict))
    if failed:
        raise VerifyError(
            f"{len(failed)} of {len(verdict.checks)} comparisons failed, first: {failed[0]}"
        )
    if not verdict.near:
        lost = ""
        if verdict.eight_bits is not None:
            lost = f", or lose more than {EIGHT_BITS_SHARE:.0%} to inputs of 8 bits"
        raise VerifyError(
            f"the {verdict.kernels} kernels differ from transformers' eager experts by more than"
            f" twice as much as transformers' grouped_mm does{lost}"
        )
    if not args.json:
        print(
            f"identical over {verdict.tokens_compared} tokens: eager kernels to transformers'"
            f" eager, {verdict.kernels} kernels to themselves with any cache"
        )


def _difference(verdict: Verdict) -> str:
    """Return a line with the largest difference between the kernels and transformers' eager."""
    ours, grouped_mm = verdict.layer_differences
    stored = " on weights as stored" if verdict.as_stored else ""
    line = f"{verdict.kernels} kernels, largest difference from transformers' eager{stored}:"
    layers = f"{ours:.3g} in a layer's output"
    if verdict.eight_bits is not None:
        difference, share = verdict.eight_bits
        layers += (
            f" with inputs of 15 bits (--kernels precise), {difference:.3g} with 8 bits,"
            f" which change {share:.1%} of it"
        )
    if not verdict.entire_model:
        return f"{line} {layers} (transformers' grouped_mm: {grouped_mm:.3g})"
    logits = f"{verdict.max_logit_difference:.3g} in logits"
    peer = f"{grouped_mm:.3g} and {verdict.grouped_mm_difference:.3g}"
    return f"{line} {layers}, {logits} (transformers' grouped_mm: {peer})"
