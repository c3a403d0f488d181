"""Measure a model's KL divergence and perplexity against its original, on a text.

The original may be another checkpoint, or the same one without an option that changes the output:
a quantised KV cache, other kernels, or approximated misses. Both are streamed, one after the other,
so that neither need fit into memory. The original's logits are written to a temporary file, in the
type that it computes them in; memory holds the logits of one window of the text, and
log-probabilities of a few of its tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.config import LoadConfig, show_bytes
from greenroom.errors import ModelError, NotAModel, OutputError, UsageError
from greenroom.hf.check.passes import logits_of, streamed_model
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.load.describe import context_of
from greenroom.hf.memory.approximate import APPROXIMATION_OPTIONS, check_copies
from greenroom.hf.memory.slots import slots_for
from greenroom.hf.model.skeleton import ModelSkeleton

WINDOW = 512  # tokens of the text that are read at a time, each window with an empty context
PASS = 64  # tokens of a pass with a quantised KV cache, so that later ones read quantised keys
ROWS = 16  # positions whose probabilities are computed at a time, in float64

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quality:
    """KL divergence and perplexity of a model against its original, over `tokens` predictions.

    kl_mean, kl_p99: of KL(original || model) of the next token's distribution, in nats
    perplexity:      exp of the mean negative log-likelihood of the text
    same_top:        how often both find the same token likeliest
    lesser:          how the model's misses were approximated (see `approximation_stats`)
    """

    model: str
    original: str
    tokens: int
    kl_mean: float
    kl_p99: float
    perplexity: float
    original_perplexity: float
    same_top: float
    lesser: dict[str, Any] | None = None


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
    lesser: Mapping[str, Any] | None = None,
    say: Report = lambda line: None,
) -> Quality:
    """Measure a model's KL divergence and perplexity against its original on a text.

    A pack's header names the original. `kv`, `kernels` and `lesser` are the model's options, the
    original has the defaults; with one of them a model may be compared with itself. With a
    quantised `kv` both are read in passes of 64 tokens. `lesser` are the options of approximate
    misses: the original is the same checkpoint, exact, unless `against` names another. Both are
    then read token by token, as decoding does, and without prefetching, so that only the cache
    decides which experts are missing. The first `tokens` of the text are read, or all. `say` is
    called with a line for each stage.

    UsageError where there is nothing to compare, or the two models do not match; OutputError where
    there is no room for the temporary file.
    """
    config = LoadConfig(cache=cache, dtype=dtype, prefetch="off" if lesser else "auto")
    changed = replace(config, kv=kv, kernels=kernels, **(lesser or {}))
    if lesser and against is None:
        original = source
    else:
        original = _find_original(source, against, itself=changed != config)
    skeletons = tuple(ModelSkeleton.of(find_checkpoint(name), dtype) for name in (source, original))
    _check_match(source, original, skeletons)
    for skeleton in skeletons:
        slots_for(cache, skeleton.catalog)  # an error comes before the work begins
    check_copies(skeletons[0].catalog, changed.approximation())
    windows = _cut_windows((source, original), skeletons, text, tokens)
    step = 1 if lesser else PASS if kv != "dynamic" else WINDOW
    size = skeletons[1].model.config.get_text_config().vocab_size
    _check_room(sum(len(window) - 1 for window in windows) * size * skeletons[1].dtype.itemsize)
    rows: list[Tensor] = []
    with tempfile.TemporaryFile() as spool:
        say(f"reading {sum(map(len, windows))} tokens with {original}")
        with streamed_model(original, config) as model:
            shapes = [_spool(_logits(model, window, step), spool) for window in windows]
        say(f"reading them with {source}{_option_text(config, changed)}")
        spool.seek(0)
        with streamed_model(source, changed) as model:
            for window, shape in zip(windows, shapes, strict=True):
                rows += _compare(spool, shape, _logits(model, window, step), window[1:])
            approximated = model.greenroom.stats().lesser
    return _result(source, original, torch.cat(rows), approximated)


def _result(source: str, original: str, rows: Tensor, lesser: dict[str, Any] | None) -> Quality:
    """Return the quality result from the rows of `_compare`."""
    kl, theirs, mine, same = rows.mean(0).tolist()
    return Quality(
        model=source,
        original=original,
        tokens=len(rows),
        kl_mean=kl,
        kl_p99=float(rows[:, 0].quantile(0.99)),
        perplexity=exp(mine),
        original_perplexity=exp(theirs),
        same_top=same,
        lesser=lesser,
    )


def _find_original(source: str, against: str | None, itself: bool) -> str:
    """Load the original to compare a model with.

    It may be the model `itself` where options differ.
    """
    checkpoint = find_checkpoint(source)
    if against is None and checkpoint.pack is None:
        if itself:
            return source
        raise UsageError(f"--quality compares with an original: name that of {source} by --against")
    original = against or checkpoint.pack.header.source.model  # type: ignore[union-attr]
    try:
        other = find_checkpoint(original)
    except ModelError as error:
        if against is not None:
            raise
        raise NotAModel(
            f"{source}: its original was not found (--against FOLDER names it): {error}"
        ) from error
    if other.folder == checkpoint.folder and not itself:
        raise UsageError(f"{source} and its original are the same model")
    return original


def _check_match(source: str, original: str, skeletons: Sequence[ModelSkeleton]) -> None:
    """Raise UsageError unless both models are decoders of one architecture and vocabulary."""
    kinds = [type(skeleton.model).__name__ for skeleton in skeletons]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{source} is a {kinds[0]} and {original} a {kinds[1]}")
    sizes = [skeleton.model.config.get_text_config().vocab_size for skeleton in skeletons]
    if sizes[0] != sizes[1]:
        raise UsageError(f"{source} has {sizes[0]} tokens and {original} has {sizes[1]}")
    if skeletons[0].model.config.is_encoder_decoder:
        raise UsageError(f"{source} is an encoder-decoder: --quality is for decoder-only models")


def _option_text(config: LoadConfig, changed: LoadConfig) -> str:
    """Return the options that only the compared model has, as on the command line."""
    names = ("kv", "kernels", *APPROXIMATION_OPTIONS)
    differ = (name for name in names if getattr(config, name) != getattr(changed, name))
    return "".join(f" --{name.replace('_', '-')} {getattr(changed, name)}" for name in differ)


def _cut_windows(
    names: Sequence[str], skeletons: Sequence[ModelSkeleton], text: str, tokens: int | None
) -> list[list[int]]:
    """Cut a text's token ids into windows; both models' tokenizers must agree on them."""
    tokenized = [tokenizer_of(skeleton.checkpoint)(text)["input_ids"] for skeleton in skeletons]
    if tokenized[0] != tokenized[1]:
        raise UsageError(f"{names[0]} and {names[1]} cut the text into different tokens")
    ids = tokenized[0][:tokens]
    window = min(WINDOW, *(context_of(skeleton.model, WINDOW) for skeleton in skeletons))
    cut = [ids[at : at + window] for at in range(0, len(ids), window)]
    windows = [each for each in cut if len(each) > 1]  # a first token is not predicted
    if not windows:
        raise UsageError("--quality: the text is too short: it needs two tokens at least")
    return windows


def _check_room(nbytes: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OutputError(
            f"{folder}: the original's logits need {show_bytes(nbytes)} there, {show_bytes(free)}"
            f" are free: fewer --tokens, or set TMPDIR"
        )


def _logits(model: PreTrainedModel, window: Sequence[int], step: int) -> Tensor:
    """Return the logits [n - 1, V] after a window's n tokens but the last.

    Each pass has `step` tokens.
    """
    return logits_of(model, torch.tensor([window], device=model.device).split(step, dim=1))[:-1]


def _spool(logits: Tensor, spool: BinaryIO) -> tuple[torch.Size, torch.dtype]:
    """Append logits to a file; returns their shape and type."""
    try:
        for row in logits:
            spool.write(row.contiguous().view(torch.uint8).numpy().data)
    except OSError as error:
        raise OutputError(
            f"{tempfile.gettempdir()}: cannot be written: {error.strerror}"
        ) from error
    return logits.shape, logits.dtype


@torch.inference_mode()
def _compare(
    spool: BinaryIO, shape: tuple[torch.Size, torch.dtype], logits: Tensor, targets: Sequence[int]
) -> Iterator[Tensor]:
    """Compare a window's logits with those of the original model, next in the file.

    Yields rows [n, 4] for some positions at a time: the KL divergence, the negative log-likelihood
    of the original and of the model, and whether the likeliest token is the same.
    """
    (count, size), dtype = shape
    for row in range(0, count, ROWS):
        stop = min(row + ROWS, count)
        raw = bytearray(spool.read((stop - row) * size * dtype.itemsize))
        original = torch.frombuffer(raw, dtype=dtype).view(stop - row, size)
        next_ids = torch.tensor(targets[row:stop])[:, None]
        p, q = (each.double().log_softmax(-1) for each in (original, logits[row:stop]))
        share = p.exp()
        gap = torch.where(share > 0, p - q, 0)  # a token of probability 0 has minus infinity
        likelihoods = [-each.gather(1, next_ids)[:, 0] for each in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).double()
        yield torch.stack([(share * gap).sum(-1), *likelihoods, same], 1)


def read_text(path: Path) -> str:
    """Return the content of a text file; UsageError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text") from error
