"""Models that read pictures, and the obstacles of the others."""

from __future__ import annotations

import os
from typing import Any

from greenroom.hf.pictures.decode import missing_decoder

MODELS = ("qwen3_vl_moe",)  # model types whose pictures are read
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # one of them is enough
OFF = "--picture-tokens 0 switches pictures off"
TEXT_ONLY = "this server takes text only"


def picture_obstacle(model: Any, most_tokens: int) -> str:
    """Return why a model takes no pictures; "" if it does.

    The model may be on the meta device.
    """
    kind, folder = model.config.model_type, model.config.name_or_path
    if kind not in MODELS:
        return f"{TEXT_ONLY}: the model's type is {kind}"
    if most_tokens == 0:
        return OFF
    if getattr(model.model, "visual", None) is None:
        return "a GGUF file has no weights that read pictures"
    if not any(os.path.isfile(os.path.join(folder, name)) for name in PROCESSORS):
        return f"the model has no {PROCESSORS[0]}"
    return missing_decoder()
