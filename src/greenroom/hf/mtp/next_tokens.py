"""Predict the token after the next one by a model's MTP layer, with a KV cache of its own.

At each position the layer gets the model's last hidden state, after the final norm, and the
embedding of the next token. Its output, through the model's output head, is a guess of the token
after that. Only tokens of the text enter the layer's KV cache, so none is ever removed. Positions
may be left out: the layer then attends to fewer tokens, and guesses a little worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenroom.errors import UnsupportedModel
from greenroom.hf.kv.batch import causal
from greenroom.hf.kv.batched_cache import length_of
from greenroom.hf.mtp.layer import LOOKUP_INSTEAD, mtp_layer_of

KEPT = 64  # hidden states of so many positions wait at most; older ones are left out
TRIED = 5  # tokens of the trial


class NextTokens:
    """Guesses the tokens of one text at a time, by a model's MTP layer.

    While `begin` to `end`, a hook keeps the hidden states of the model's passes.
    """

    def __init__(self, model: Any) -> None:
        """Raise UnsupportedModel if the layer cannot compute with this model."""
        self._model, self._layer = model, mtp_layer_of(model)
        self._decoder = model.get_decoder()
        self._ids: list[int] = []
        self._cache: Any = None
        self._prompt = False  # whether the prompt is being read
        self._passed: Tensor | None = None  # hidden states of the last pass [1, tokens, hidden]
        self._waiting: Tensor | None = None  # hidden states that the layer has not seen
        self._position = 0  # of the first of them
        self._hook: Any = None
        self._try()

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a text, before the model reads its prompt."""
        self._restart(prompt)
        self._prompt = True
        self._hook = self._decoder.register_forward_hook(self._on_pass)

    def end(self) -> None:
        """End the text, and free its KV cache."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._cache = self._passed = self._waiting = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens to the text: those after the prompt, or after the last pass.

        As many first tokens of that pass belong to the text.
        """
        if not self._prompt:
            assert self._passed is not None
            self._wait(self._passed[:, : len(tokens)])
        self._prompt = False
        self._ids += tokens

    def predict(self) -> int:
        """Return a guess of the token that follows the text."""
        return int(self.logits().argmax())

    def logits(self) -> Tensor:
        """Return the logits [vocabulary] of the token that follows the text."""
        assert self._waiting is not None
        out = self._compute(self._waiting.shape[1])
        logits: Tensor = self._model.get_output_embeddings()(out[:, -1:])[0, 0]
        return logits

    def _restart(self, ids: Sequence[int]) -> None:
        setup = self._model.greenroom.setup
        self._ids, self._position, self._waiting = list(ids), 0, None
        self._cache = setup.empty_cache(self._layer.config)
        setup.make_growing(self._cache)

    def _on_pass(self, module: Any, args: Any, out: Any) -> None:
        self._passed = out.last_hidden_state
        if self._prompt:  # the next tokens are known, but for the prompt's last one
            self._wait(self._passed)
            known = len(self._ids) - 1 - self._position
            assert self._waiting is not None
            if count := min(known, self._waiting.shape[1]):
                self._compute(count)

    def _wait(self, hidden: Tensor) -> None:
        """Append hidden states to those that wait for the layer."""
        if self._waiting is not None and self._waiting.shape[1]:
            hidden = torch.cat([self._waiting, hidden], 1)
        if not self._prompt and (excess := hidden.shape[1] - KEPT) > 0:
            hidden, self._position = hidden[:, excess:], self._position + excess
        self._waiting = hidden

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
                self._restart([0] * (TRIED + 1))
                self._wait(hidden.to(model.device, model.dtype))
                self._compute(TRIED - 1)
                self.logits()
        except Exception as error:  # a model's own code fails in its own way
            raise UnsupportedModel(
                f"--speculate mtp: the MTP layer of {type(model).__name__} fails:"
                f" {str(error)[:200]!r}: {LOOKUP_INSTEAD}"
            ) from error
        finally:
            self.end()
