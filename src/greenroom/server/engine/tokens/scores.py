"""Log-probabilities of a prompt's tokens, for requests with `prompt_logprobs`.

For such a request, a forward pass returns the logits of every token, not only of the last one. At
each position, the log-probabilities of the prompt's next token and of the likeliest tokens are
stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from greenroom.errors import ModelError, UsageError
from greenroom.server.engine.requests import Token

LOGITS_BYTES = 64 << 20  # of a prompt in one pass
ROWS = 32  # of logits that are converted to float32 at a time
MOST = 100  # likeliest tokens of each place


class PromptScores:
    """Collects the log-probabilities of one prompt's tokens, over several forward passes.

    `ids` is the prompt. At each position, the `top` likeliest tokens are stored too; UsageError if
    `top` is above 100. `pass_tokens` is the greatest number of tokens of a pass, so that their
    logits, `vocabulary` values of `itemsize` bytes each, take at most 64 MiB.
    """

    def __init__(self, ids: Sequence[int], top: int, vocabulary: int, itemsize: int) -> None:
        most = min(MOST, vocabulary)
        if not 0 <= top <= most:
            raise UsageError(f"prompt_logprobs must be from 0 to {most}, got {top}")
        self._ids, self._top = tuple(ids), top
        self.pass_tokens = max(1, LOGITS_BYTES // (vocabulary * itemsize))
        self.clear()

    def clear(self) -> None:
        """Drop all log-probabilities of the prompt, because its tokens are computed again."""
        self.tokens = [Token(self._ids[0])]  # has no score

    def add(self, logits: Tensor, first: int) -> None:
        """Add the logits [tokens, vocabulary] of the prompt's tokens from position `first` on.

        ModelError if the largest logit of a token is NaN or infinite.
        """
        following = self._ids[first + 1 : first + 1 + len(logits)]
        for at in range(0, len(following), ROWS):
            ids = following[at : at + ROWS]
            rows = logits[at : at + len(ids)].float()
            if not bool(rows.amax(-1).isfinite().all()):
                raise ModelError(
                    "the model's logits are not finite numbers: the prompt has no log-probabilities"
                )
            self._add(rows.log_softmax(-1), ids)

    def _add(self, rows: Tensor, ids: tuple[int, ...]) -> None:
        following = rows.gather(1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
        values, likeliest = (each.tolist() for each in rows.topk(self._top))
        for token, logprob, *top in zip(ids, following, likeliest, values, strict=True):
            self.tokens.append(Token(token, logprob, tuple(zip(*top, strict=True))))
