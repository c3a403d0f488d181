"""A model's generation config: as transformers loads it, and as streaming needs it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel

from greenroom.hf.kv.kinds import Kind
from greenroom.hf.memory.budget import PREFILL_BLOCK


def replace_settings(model: PreTrainedModel, kv: Kind) -> Any:
    """Have `generate` read prompts in blocks and keep keys and values as `kv` says. Returns the
    config that the model had."""
    settings: Any = model.generation_config
    before = deepcopy(settings)
    if not model.config.is_encoder_decoder:  # an encoder reads a prompt as a whole
        settings.prefill_chunk_size = PREFILL_BLOCK
    for name, value in kv.implementation.items():
        setattr(settings, name, value)
    return before
