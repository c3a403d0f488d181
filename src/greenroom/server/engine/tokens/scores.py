"""Log-probabilities of a prompt's own tokens, which a request for `prompt_logprobs` wants.

A pass gives such a request the logits of all its tokens and not of the last alone. Of each row only
the log-probability of the token that follows stays, and those of the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greenroom.errors import ModelError, UsageError
from greenroom.server.engine.requests import Token

LOGITS_BYTES = 64 << 20  # of a prompt in one pass
ROWS = 32  # that are in float32 at a time
MOST = 100  # likeliest tokens of each place


class PromptScores:
    """The scores of one prompt, of which passes bring a part each.

    `vocabulary` logits of `itemsize` bytes follow each token; `top` is how many of the likeliest
    tokens are wanted at each place. UsageError where that cannot be.
    """

    def __init__(self, ids: Sequence[int], top: int, vocabulary: int, itemsize: int) -> None:
        most = min(MOST, vocabulary)
        if not 0 <= top <= most:
            raise UsageError(f"prompt_logprobs must be from 0 to {most}, got {top}")
        self._ids, self._top = tuple(ids), top
        self.pass_tokens = max(1, LOGITS_BYTES // (vocabulary * itemsize))
        self.clear()

    def clear(self) -> None:
        """Nothing of the prompt is scored."""
        self.tokens = [Token(self._ids[0])]  # which nothing is before

    def add(self, logits: Tensor, first: int) -> None:
        """Take the logits [tokens, V] of the prompt's tokens from `first` on. ModelError where they
        are not finite."""
        following = self._ids[first + 1 : first + 1 + len(logits)]
        for at in range(0, len(following), ROWS):
            ids = following[at : at + ROWS]
            rows = logits[at : at + len(ids)].float()
            if not bool(rows.amax(-1).isfinite().all()):
                raise ModelError("the model's logits are no finite numbers: nothing can be scored")
            self._add(rows.log_softmax(-1), ids)

    def _add(self, rows: Tensor, ids: tuple[int, ...]) -> None:
        own = rows.gather(1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
        values, likeliest = (each.tolist() for each in rows.topk(self._top))
        for token, logprob, *top in zip(ids, own, likeliest, values, strict=True):
            self.tokens.append(Token(token, logprob, tuple(zip(*top, strict=True))))
