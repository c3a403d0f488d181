"""Construct models on the meta device."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.monkey_patching import patch_output_recorders

from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.library_errors import wrap_library_errors


def construct(
    kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, experts: str
) -> PreTrainedModel:
    """Construct a model on the meta device, without memory for parameters.

    `experts` is the name of the experts implementation.
    """
    config._experts_implementation = experts
    with ExitStack() as stack:
        for context in kind.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        with wrap_library_errors(
            f"{kind.__name__} cannot be built from this config", UnsupportedModel
        ):
            model = kind(config)
        patch_output_recorders(model)
    return model


def remove_towers(model: PreTrainedModel) -> None:
    """Remove what reads pictures and sound from a multimodal model, but not its text model.

    GGUF has the weights of these modules in another file (mmproj), which Greenroom does not read.
    """
    base = model.base_model
    if isinstance(getattr(base, "language_model", None), nn.Module):
        for name, _ in [*base.named_children()]:
            if name != "language_model":
                setattr(base, name, None)
