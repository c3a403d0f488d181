"""Predict the token after the next one by a model's MTP layer.

The layer has a KV cache of its own. At each position it gets the model's last hidden state, after
the final norm, and the embedding of the next token. Its output, through the model's output head, is
a guess of the token after that. Only tokens of the text enter the layer's KV cache, so none is ever
removed. Positions may be left out: the layer then attends to fewer tokens, and guesses a little
worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from greenroom.errors import UnsupportedModel
from greenroom.hf.kv.batch import causal
from greenroom.hf.kv.batched_cache import length_of
from greenroom.hf.mtp.layer import LOOKUP_INSTEAD, mtp_layer_of

# Hidden states of so many positions wait at most; older ones are left out. Each takes experts of
# its own, so many of them would cost more than a pass.
MOST_WAITING = 4
TRIED = 5  # tokens of the trial


class NextTokens:
    """Guesses the tokens of one text at a time, by a model's MTP layer.

    A hook on the model's decoder keeps the hidden states of its last pass. They wait until a guess
    is wanted. If too many wait, the layer computes those of a prompt, and leaves out others.
    """

    def __init__(self, model: Any) -> None:
        """Raise UnsupportedModel if the layer cannot compute with this model."""
        self._model, self._layer = model, mtp_layer_of(model)
        self._decoder = model.get_decoder()
        self._ids: Sequence[int] = ()
        self._reading: Sequence[int] | None = None  # the prompt, while it is being read
        self._cache: Any = None
        self._passed: Tensor | None = None  # hidden states of the last pass [1, tokens, hidden]
        self._waiting: Tensor | None = None  # hidden states that the layer has not seen
        self._position = 0  # of the first of them, or of the next one
        self._try()
        self._decoder.register_forward_hook(self._on_pass)

    @classmethod
    def of(cls, model: Any, obstacle: str) -> NextTokens | None:
        """Return the guesses of a model's MTP layer; None if it was not loaded.

        Raises UnsupportedModel if it was, but passes cannot verify drafts, for the reason
        `obstacle`.
        """
        if mtp_layer_of(model) is None:
            return None
        if obstacle:
            raise UnsupportedModel(f"--speculate mtp: {obstacle}: leave it out")
        return cls(model)

    @property
    def is_ready(self) -> bool:
        """Tell whether the token after the text can be guessed."""
        return self._count == len(self._ids) - 1 - self._position > 0

    @property
    def _count(self) -> int:
        return 0 if self._waiting is None else self._waiting.shape[1]

    def begin(self) -> None:
        """Begin another text."""
        setup = self._model.greenroom.setup
        self._ids, self._position, self._waiting, self._reading = (), 0, None, None
        self._cache = setup.empty_cache(self._layer.config)
        setup.make_growing(self._cache)

    def end(self) -> None:
        """End the text, and free its KV cache."""
        self._cache = self._passed = self._waiting = None

    @contextmanager
    def reading(self, prompt: Sequence[int]) -> Iterator[None]:
        """Begin a text whose prompt the model reads in this context."""
        self.begin()
        self._reading = prompt
        try:
            yield
            if count := len(prompt) - 1 - self._position:  # not in the time of the first draft
                self._compute(count)
        finally:
            self._reading = None

    def see(self, ids: Sequence[int], position: int, count: int) -> None:
        """Keep the hidden states of the first tokens of the model's last pass.

        ids:      the text, with at least one token after these
        position: where the first of these tokens is in the text; tokens that no pass has computed,
                  since they are in a reused KV cache, are left out
        count:    how many tokens of the pass belong to the text
        """
        passed, self._ids = self._passed, ids
        if passed is None or not 0 < count <= passed.shape[1]:
            return
        hidden = passed[:, :count]
        if position == self._position + self._count and self._waiting is not None:
            hidden = torch.cat([self._waiting, hidden], 1)
        else:
            self._position = position
        self._waiting = hidden
        if count > MOST_WAITING:
            self._compute(min(len(ids) - 1 - self._position, self._count))
        elif (excess := self._count - MOST_WAITING) > 0:
            self._waiting, self._position = hidden[:, excess:], self._position + excess

    def predict(self) -> int:
        """Return a guess of the token that follows the text."""
        return int(self.logits().argmax())

    def logits(self) -> Tensor:
        """Return the logits [vocabulary] of the token that follows the text."""
        out = self._compute(self._count)
        logits: Tensor = self._model.get_output_embeddings()(out[:, -1:])[0, 0]
        return logits

    def _on_pass(self, module: Any, args: Any, out: Any) -> None:
        hidden = self._passed = out.last_hidden_state
        if self._reading is not None:
            self.see(self._reading, self._position + self._count, hidden.shape[1])

    def _compute(self, count: int) -> Tensor:
        """Return the layer's outputs [1, count, hidden] for the first hidden states that wait."""
        assert self._waiting is not None
        begin, model = self._position + 1, self._model
        hidden, self._waiting = self._waiting[:, :count], self._waiting[:, count:]
        self._position += count
        tokens = torch.tensor([self._ids[begin : begin + count]], device=hidden.device)
        x = model.get_input_embeddings()(tokens)
        positions = torch.arange(begin, begin + count, device=hidden.device)[None]
        out: Tensor = self._layer(
            x,
            hidden,
            position_embeddings=self._decoder.rotary_emb(x, positions),
            attention_mask=self._mask(count, x),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out

    def _mask(self, count: int, x: Tensor) -> Tensor | None:
        """Return the attention mask of new tokens, in the form of the model's attention."""
        mask = causal(count, length_of(self._cache) + count, None, x)
        if mask is None or self._layer.config._attn_implementation != "eager":
            return mask
        least = torch.finfo(x.dtype).min
        return torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, least)

    @torch.inference_mode()
    def _try(self) -> None:
        """Compute a few tokens without experts."""
        model = self._model
        hidden = torch.zeros(1, TRIED, model.config.get_text_config().hidden_size)
        try:
            with model.greenroom.hooks.without_experts():
                self.begin()
                self._ids = [0] * (TRIED + 1)
                self._waiting = hidden.to(model.device, model.dtype)
                self._compute(TRIED - 1)
                self.logits()
        except Exception as error:  # a model's own code fails in its own way
            raise UnsupportedModel(
                f"--speculate mtp: the MTP layer of {type(model).__name__} fails:"
                f" {str(error)[:200]!r}: {LOOKUP_INSTEAD}"
            ) from error
        finally:
            self.end()
