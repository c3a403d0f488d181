"""Measure a model's KL divergence and perplexity against its original, on a text.

The original may be another checkpoint, or the same one without an option that changes the output:
a quantised KV cache, other kernels, or approximated misses. Both models are streamed, one after the
other, so that neither needs to fit into memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from greenroom.config import LoadConfig
from greenroom.errors import ModelError, NotAModel, UsageError
from greenroom.hf.check.passes import streamed_model
from greenroom.hf.check.windows import (
    WINDOW,
    LogitDistance,
    check_room,
    compare_windows,
    cut_windows,
    spool_windows,
)
from greenroom.hf.checkpoint.resolve import find_checkpoint, resolve
from greenroom.hf.memory.approximate import APPROXIMATION_OPTIONS, check_copies
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton

PASS = 64  # tokens of a pass with a quantised KV cache, so that later ones read quantised keys

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quality:
    """KL divergence and perplexity of a model against its original, over a text.

    tokens:          number of predicted tokens
    kl_mean, kl_p99: mean and 99th percentile of KL(original || model) of the next token's
                     distribution, in nats
    perplexity:      exp of the mean negative log-likelihood of the text
    same_top:        share of tokens for which both models have the same likeliest token
    approximated:    counts of cache misses whose expert was approximated (by a low-precision
                     copy, another expert or nothing); None if all misses were exact
    """

    model: str
    original: str
    tokens: int
    kl_mean: float
    kl_p99: float
    perplexity: float
    original_perplexity: float
    same_top: float
    approximated: dict[str, Any] | None = None


def quality(
    source: str,
    text: str,
    against: str | None = None,
    *,
    cache: str | int = "10%",
    dtype: str = "auto",
    tokens: int | None = None,
    kv: str = "dynamic",
    kernels: str = "auto",
    approximation: Mapping[str, Any] | None = None,
    config: str | None = None,
    say: Report = lambda line: None,
) -> Quality:
    """Measure a model's KL divergence and perplexity against its original on a text.

    source:  folder or hub id of the model
    against: the original; by default the model that a pack was made of, or else the model itself
             without the options `kv`, `kernels` and `approximation`
    cache:   size of the expert cache of both models
    tokens:  number of the text's first tokens that are computed; None for all
    kv, kernels: options of the model; the original has the defaults
    approximation: options that approximate the experts missing from the cache, by name; without
             `against` the original is then the same checkpoint without them
    config:  the config of the GGUF files among the two models: a folder, a file or a hub id
    say:     called with a line for each stage

    A forward pass has 512 tokens of the text. If `kv` is not dynamic, it has 64 tokens, so that
    later passes read quantised keys. With `approximation`, it has one token, as in decoding, and no
    expert is prefetched.

    Raises UsageError if there is no original or the two models do not match, and OutputError if the
    temporary file for the original's logits cannot be written.
    """
    load = LoadConfig(cache=cache, dtype=dtype, prefetch="off" if approximation else "auto")
    changed = replace(load, kv=kv, kernels=kernels, **(approximation or {}))
    itself = bool(approximation) and against is None
    original = source if itself else _find_original(source, against, config, changed != load)
    configs = _configs_of(source, original, config)
    opened = map(find_checkpoint, (source, original), configs)
    skeletons = [ModelSkeleton.of(checkpoint, dtype) for checkpoint in opened]
    _check_match(source, original, skeletons)
    for skeleton in skeletons:
        slots_for(cache, skeleton.catalog)  # an error comes before the work begins
    check_copies(skeletons[0].catalog, changed.approximation())
    windows = cut_windows((source, original), skeletons, text, tokens)
    step = 1 if approximation else PASS if kv != "dynamic" else WINDOW
    check_room(windows, skeletons[1])
    with tempfile.TemporaryFile() as spool:
        say(f"computing {sum(map(len, windows))} tokens with {original}")
        with streamed_model(original, replace(load, config=configs[1])) as model:
            spooled = spool_windows(model, windows, step, spool)
        say(f"computing the same tokens with {source}{_option_text(load, changed)}")
        with streamed_model(source, replace(changed, config=configs[0])) as model:
            rows = compare_windows(model, windows, step, spool, spooled)
            approximated = model.greenroom.stats().approximated
    return _result(source, original, rows, approximated)


def _result(
    source: str, original: str, rows: Tensor, approximated: dict[str, Any] | None
) -> Quality:
    """Make the quality result from the rows of `compare_windows`."""
    distance, perplexity = LogitDistance.of(rows)
    return Quality(
        model=source,
        original=original,
        tokens=len(rows),
        original_perplexity=perplexity,
        approximated=approximated,
        **asdict(distance),
    )


def _configs_of(source: str, original: str, config: str | None) -> list[str | None]:
    """Return the configs of both models; UsageError if there is one, but no GGUF file."""
    configs = [_config_of(name, config) for name in (source, original)]
    if config is not None and not any(configs):
        raise UsageError(
            f"--config is for GGUF files, but neither {source} nor {original} is one: leave it out"
        )
    return configs


def _config_of(model: str, config: str | None) -> str | None:
    """Return the config that a model is opened with: None if the model is no GGUF file."""
    return config if config is not None and resolve(model).suffix == ".gguf" else None


def _find_original(source: str, against: str | None, config: str | None, itself: bool) -> str:
    """Find the name of the original to compare a model with.

    With `itself`, the model differs from its original in options, so both may be one checkpoint.
    """
    checkpoint = find_checkpoint(source, _config_of(source, config))
    if against is None and checkpoint.pack is None:
        if itself:
            return source
        raise UsageError(
            f"--quality needs an original to compare {source} with: name one by --against"
        )
    original = against or checkpoint.pack.header.source.model  # type: ignore[union-attr]
    try:
        other = find_checkpoint(original, _config_of(original, config))
    except ModelError as error:
        if against is not None:
            raise
        raise NotAModel(
            f"the original of {source} was not found: {error}; name its folder by --against"
        ) from error
    if other.folder == checkpoint.folder and not itself:
        raise UsageError(
            f"{source} and its original are the same model: name another original by --against"
        )
    return original


def _check_match(source: str, original: str, skeletons: Sequence[ModelSkeleton]) -> None:
    """Raise UsageError unless both models are decoders of one architecture and vocabulary."""
    kinds = [type(skeleton.model).__name__ for skeleton in skeletons]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"--quality compares models of one architecture: {source} is a {kinds[0]}, and"
            f" {original} is a {kinds[1]}"
        )
    sizes = [skeleton.model.config.get_text_config().vocab_size for skeleton in skeletons]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"--quality compares models of one vocabulary: {source} has {sizes[0]} tokens, and"
            f" {original} has {sizes[1]}"
        )
    if skeletons[0].model.config.is_encoder_decoder:
        raise UsageError(
            f"{source} is an encoder-decoder model: --quality is for decoder-only models"
        )


def _option_text(config: LoadConfig, changed: LoadConfig) -> str:
    """Return the options in which the compared model differs, as on the command line."""
    names = ("kv", "kernels", *APPROXIMATION_OPTIONS)
    differ = (name for name in names if getattr(config, name) != getattr(changed, name))
    return "".join(f" --{name.replace('_', '-')} {getattr(changed, name)}" for name in differ)


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises UsageError if that fails."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
