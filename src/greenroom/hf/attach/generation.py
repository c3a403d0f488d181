"""A model's generation config: as transformers loads it, and as streaming needs it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel

from greenroom.hf.kv.kinds import Kind
from greenroom.hf.memory.budget import PREFILL_BLOCK


class GenerationSettings:
    """Has `generate` read prompts in blocks and keep keys and values as `kv` says, until it is
    restored."""

    def __init__(self, model: PreTrainedModel, kv: Kind) -> None:
        self._config: Any = deepcopy(getattr(model, "generation_config", None))
        settings: Any = model.generation_config
        if not model.config.is_encoder_decoder:  # an encoder reads a prompt as a whole
            settings.prefill_chunk_size = PREFILL_BLOCK
        for name, value in kv.implementation.items():
            setattr(settings, name, value)

    def restore(self, model: Any) -> None:
        """Give the model the settings that it had."""
        model.generation_config = self._config
