"""Construct models on the meta device, and their generation configs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.monkey_patching import patch_output_recorders

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.library_errors import wrap_library_errors
from greenroom.json_file import read_object


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


def load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Set a model's generation config from the checkpoint's files, like transformers.

    The file is generation_config.json, or config.json if that does not exist. Raises
    CheckpointError for an invalid file.
    """
    if not model.can_generate():
        return
    path = folder / "generation_config.json"
    options: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
    if path.is_file():  # transformers silently takes its defaults for a file that is no JSON
        read_object(path, CheckpointError)
        options = {}
    with wrap_library_errors(f"{path}: not a valid generation config"):
        model.generation_config = GenerationConfig.from_pretrained(
            folder, local_files_only=True, **options
        )
