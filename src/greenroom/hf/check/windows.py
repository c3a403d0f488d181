"""A model's logits on windows of a text, and their distance from an original's.

The original's logits are written to a temporary file in the dtype of the model. Memory holds the
logits of one window of the text, and the log-probabilities of a few tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import BinaryIO

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.config import show_bytes
from greenroom.errors import OutputError, UsageError
from greenroom.hf.check.passes import logits_of
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.load.describe import context_of
from greenroom.hf.model.skeleton import ModelSkeleton

WINDOW = 512  # tokens of the text that are read at a time, each window with an empty context
ROWS = 16  # positions whose probabilities are computed at a time, in float64

Spooled = tuple[torch.Size, torch.dtype]  # of the logits of a window in the file


@dataclass(frozen=True, slots=True)
class LogitDistance:
    """Distance of a model's next-token distributions from an original's, over a text.

    kl_mean, kl_p99: mean and 99th percentile of KL(original || model), in nats
    perplexity:      exp of the mean negative log-likelihood of the text by the model
    same_top:        share of tokens for which both models have the same likeliest token
    """

    kl_mean: float
    kl_p99: float
    perplexity: float
    same_top: float

    @classmethod
    def of(cls, rows: Tensor) -> tuple[LogitDistance, float]:
        """Return the distance and the original's perplexity, from rows of `compare_windows`."""
        kl, theirs, mine, same = rows.mean(0).tolist()
        return cls(kl, float(rows[:, 0].quantile(0.99)), exp(mine), same), exp(theirs)


def cut_windows(
    names: Sequence[str], skeletons: Sequence[ModelSkeleton], text: str, tokens: int | None
) -> list[list[int]]:
    """Cut a text's token ids into windows of at most 512 tokens.

    Raises UsageError if the tokenizers of the named models differ.
    """
    tokenized = [tokenizer_of(skeleton.checkpoint)(text)["input_ids"] for skeleton in skeletons]
    if tokenized[0] != tokenized[-1]:
        raise UsageError(
            f"the tokenizers of {names[0]} and {names[1]} make different tokens of the text:"
            " --quality compares models of one tokenizer"
        )
    ids = tokenized[0][:tokens]
    window = min(WINDOW, *(context_of(skeleton.model, WINDOW) for skeleton in skeletons))
    cut = [ids[at : at + window] for at in range(0, len(ids), window)]
    windows = [each for each in cut if len(each) > 1]  # a first token is not predicted
    if not windows:
        raise UsageError("the text of --quality is too short: at least 2 tokens are needed")
    return windows


def check_room(windows: Sequence[Sequence[int]], original: ModelSkeleton) -> None:
    """Raise OutputError if the original's logits do not fit on the disk."""
    size = original.model.config.get_text_config().vocab_size
    nbytes = sum(len(window) - 1 for window in windows) * size * original.dtype.itemsize
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OutputError(
            f"the original's logits need {show_bytes(nbytes)} in {folder}, which has"
            f" {show_bytes(free)} free: give fewer --tokens, or set TMPDIR to another disk"
        )


def spool_windows(
    model: PreTrainedModel, windows: Sequence[Sequence[int]], step: int, spool: BinaryIO
) -> list[Spooled]:
    """Write a model's logits on all windows to a file.

    A forward pass has `step` tokens. Returns the shape and dtype of each window's logits. Raises
    OutputError if writing fails.
    """
    spooled = []
    for window in windows:
        logits = _logits(model, window, step)
        try:
            for row in logits:
                spool.write(row.contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            raise OutputError(
                f"cannot write the original's logits to {tempfile.gettempdir()}: {error.strerror}:"
                " set TMPDIR to another folder"
            ) from error
        spooled.append((logits.shape, logits.dtype))
    return spooled


def compare_windows(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    step: int,
    spool: BinaryIO,
    spooled: Sequence[Spooled],
) -> Tensor:
    """Compare a model's logits with those that `spool_windows` wrote to a file.

    Returns a row for each predicted token: the KL divergence, the negative log-likelihood by the
    original and by the model, and 1 if the likeliest token is the same.
    """
    spool.seek(0)
    rows = [
        part
        for window, each in zip(windows, spooled, strict=True)
        for part in _compare(spool, each, _logits(model, window, step), window[1:])
    ]
    return torch.cat(rows)


def _logits(model: PreTrainedModel, window: Sequence[int], step: int) -> Tensor:
    """Return the logits [tokens - 1, vocabulary] after all of a window's tokens but the last."""
    return logits_of(model, torch.tensor([window], device=model.device).split(step, dim=1))[:-1]


@torch.inference_mode()
def _compare(
    spool: BinaryIO, spooled: Spooled, logits: Tensor, targets: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the rows of `compare_windows` for a few positions of a window at a time."""
    (count, size), dtype = spooled
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
