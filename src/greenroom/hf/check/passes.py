"""Run forward passes of one request and return their logits, without `generate`.

    passes = Passes(model)
    logits = passes(prompt)      # ids [1, tokens] -> logits [tokens, vocabulary]
    logits = passes(token)       # ids [1, 1] -> logits [1, vocabulary], with all earlier tokens

In an encoder-decoder model, the first ids go to the encoder, and the decoder begins with its start
token. The next ids go to the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.hf.load.load import load_with
from greenroom.runtime.memory.system import release_memory


@contextmanager
def streamed_model(source: str, config: LoadConfig) -> Iterator[PreTrainedModel]:
    """Context manager that loads a model with streamed experts, and frees it at the end.

    The run neither uses nor saves what Greenroom stores between runs.
    """
    model, _ = load_with(source, config, remember=False)
    try:
        yield model
    finally:
        model.greenroom.detach()
        del model
        release_memory()


def start_token(model: PreTrainedModel) -> int:
    """Return the token id with which an encoder-decoder model's decoder begins.

    The result is 0 if the model's configs name neither a decoder start token nor a BOS token.
    """
    for config in (model.generation_config, model.config):
        token = getattr(config, "decoder_start_token_id", None)
        token = getattr(config, "bos_token_id", None) if token is None else token
        if token is not None:
            return int(token)
    return 0


@torch.inference_mode()
def logits_of(model: PreTrainedModel, inputs: Iterable[Tensor]) -> Tensor:
    """Run one sequence through a model, and return its logits in host memory.

    Each of `inputs` has token ids [1, tokens], and is one forward pass with the KV cache of the
    passes before. The result is [tokens of all inputs, vocabulary].
    """
    passes = Passes(model)
    return torch.cat([passes(ids).cpu() for ids in inputs])


class Passes:
    """Runs the forward passes of one sequence, with one KV cache for all of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._cache, self._encoded = model, None, None

    def __call__(self, ids: Tensor) -> Tensor:
        model = self._model
        inputs: dict[str, Any] = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            if self._encoded is None:
                self._encoded = model.get_encoder()(input_ids=ids)
                ids = torch.full((len(ids), 1), start_token(model), dtype=ids.dtype)
            inputs = {"encoder_outputs": self._encoded, "decoder_input_ids": ids}
        out: Any = model(**inputs, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: Tensor = out.logits[0]
        return logits
