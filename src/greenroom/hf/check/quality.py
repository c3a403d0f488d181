"""What a model loses against its original: KL divergence and perplexity on a text.

The original may be another checkpoint, or the same one without an option that changes what is
computed: quantised keys and values, other kernels, or approximated misses. Both are
streamed, one after the other, so that neither need fit into memory. The original's logits wait in a
temporary file, in the type that it computes them in; what is in memory are those of one window of
the text, and log-probabilities of a few tokens of it.
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

WINDOW = 512  # tokens that are read at a time, without what came before them
PASS = 64  # tokens of a pass, where keys and values of those before it shall be read as kept
ROWS = 16  # positions whose probabilities are computed at a time, in float64

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quality:
    """A model against its original, over `tokens` predictions.

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
    say: Say = lambda line: None,
) -> Quality:
    """Compare a model with the one that it was made from; a pack knows which one that was.

    `kv`, `kernels` and `lesser` are the model's alone, its original has the defaults; a model with
    one of them may be compared with itself. Quantised keys and values are read in passes of 64
    tokens, by both. `lesser` are the options of misses: what is compared with is the
    same checkpoint, exact, unless another is named; both read token by token, as decoding does,
    without prefetching, so that the cache alone decides. The first `tokens` of the text are taken,
    or all. UsageError where there is nothing to compare, or the two do not go together; OutputError
    where there is no room for the temporary
    file.
    """
    config = LoadConfig(cache=cache, dtype=dtype, prefetch="off" if lesser else "auto")
    changed = replace(config, kv=kv, kernels=kernels, **(lesser or {}))
    if lesser and against is None:
        original = source
    else:
        original = _original(source, against, itself=changed != config)
    skeletons = tuple(ModelSkeleton.of(find_checkpoint(name), dtype) for name in (source, original))
    _check(source, original, skeletons)
    for skeleton in skeletons:
        slots_for(cache, skeleton.catalog)  # a mistake shows before the work begins
    check_copies(skeletons[0].catalog, changed.approximation())
    whole = skeletons[1]
    windows = _windows((source, original), skeletons, text, tokens)
    step = 1 if lesser else PASS if kv != "dynamic" else WINDOW
    size = whole.model.config.get_text_config().vocab_size
    _check_room(sum(len(window) - 1 for window in windows) * size * whole.dtype.itemsize)
    found: list[Tensor] = []
    with tempfile.TemporaryFile() as spool:
        say(f"reading {sum(map(len, windows))} tokens with {original}")
        with streamed_model(original, config) as model:
            kinds = [_keep(_logits(model, window, step), spool) for window in windows]
        say(f"reading them with {source}{_named(config, changed)}")
        spool.seek(0)
        with streamed_model(source, changed) as model:
            for window, kind in zip(windows, kinds, strict=True):
                found += _compare(spool, kind, _logits(model, window, step), window[1:])
            served = model.greenroom.stats().lesser
    return _result(source, original, torch.cat(found), served)


def _result(source: str, original: str, rows: Tensor, lesser: dict[str, Any] | None) -> Quality:
    """The figures of `rows` as `_compare` makes them."""
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


def _original(source: str, against: str | None, itself: bool) -> str:
    """What to compare with; the model may be compared with `itself` where options differ."""
    checkpoint = find_checkpoint(source)
    if against is None and checkpoint.pack is None:
        if itself:
            return source
        raise UsageError(f"--quality compares with an original: --against names that of {source}")
    original = against or checkpoint.pack.header.source.model  # type: ignore[union-attr]
    try:
        other = find_checkpoint(original)
    except ModelError as error:
        if against is not None:
            raise
        raise NotAModel(
            f"{source}: its original is not there (--against FOLDER): {error}"
        ) from error
    if other.folder == checkpoint.folder and not itself:
        raise UsageError(f"{source} and its original are the same model")
    return original


def _check(source: str, original: str, skeletons: Sequence[ModelSkeleton]) -> None:
    """The two must be of one architecture, and decoders."""
    kinds = [type(skeleton.model).__name__ for skeleton in skeletons]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{source} is a {kinds[0]} and {original} a {kinds[1]}")
    sizes = [skeleton.model.config.get_text_config().vocab_size for skeleton in skeletons]
    if sizes[0] != sizes[1]:
        raise UsageError(f"{source} has {sizes[0]} tokens and {original} has {sizes[1]}")
    if skeletons[0].model.config.is_encoder_decoder:
        raise UsageError(
            f"{source} is an encoder-decoder: --quality reads a text as a decoder does"
        )


def _named(config: LoadConfig, changed: LoadConfig) -> str:
    """The options that only the model has, as they are written."""
    names = ("kv", "kernels", *APPROXIMATION_OPTIONS)
    differ = (name for name in names if getattr(config, name) != getattr(changed, name))
    return "".join(f" --{name.replace('_', '-')} {getattr(changed, name)}" for name in differ)


def _windows(
    names: Sequence[str], skeletons: Sequence[ModelSkeleton], text: str, tokens: int | None
) -> list[list[int]]:
    """The text's token ids, cut into windows; both tokenizers must agree on them."""
    found = [tokenizer_of(skeleton.checkpoint)(text)["input_ids"] for skeleton in skeletons]
    if found[0] != found[1]:
        raise UsageError(f"{names[0]} and {names[1]} cut the text into different tokens")
    ids = found[0][:tokens]
    window = min(WINDOW, *(context_of(skeleton.model, WINDOW) for skeleton in skeletons))
    cut = [ids[at : at + window] for at in range(0, len(ids), window)]
    windows = [each for each in cut if len(each) > 1]  # what has nothing before it is not predicted
    if not windows:
        raise UsageError("--quality: the text is too short: it has no two tokens")
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
    """What follows each token of a window but the last, read `step` tokens a pass: [n - 1, V]."""
    return logits_of(model, torch.tensor([window], device=model.device).split(step, dim=1))[:-1]


def _keep(logits: Tensor, spool: BinaryIO) -> tuple[torch.Size, torch.dtype]:
    """Append logits to the file."""
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
    spool: BinaryIO, kind: tuple[torch.Size, torch.dtype], logits: Tensor, targets: Sequence[int]
) -> Iterator[Tensor]:
    """Of some positions of a window at a time, [n, 4]: the divergence, both negative
    log-likelihoods, and whether both find the same token likeliest. The original's logits are the
    next in the file."""
    (count, size), dtype = kind
    for row in range(0, count, ROWS):
        stop = min(row + ROWS, count)
        raw = bytearray(spool.read((stop - row) * size * dtype.itemsize))
        original = torch.frombuffer(raw, dtype=dtype).view(stop - row, size)
        wanted = torch.tensor(targets[row:stop])[:, None]
        p, q = (each.double().log_softmax(-1) for each in (original, logits[row:stop]))
        share = p.exp()
        gap = torch.where(share > 0, p - q, 0)  # what has no chance has logits of minus infinity
        likelihoods = [-each.gather(1, wanted)[:, 0] for each in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).double()
        yield torch.stack([(share * gap).sum(-1), *likelihoods, same], 1)


def text_in(path: Path) -> str:
    """A text file's content; UsageError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text") from error
