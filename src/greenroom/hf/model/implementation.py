"""Registration of the experts implementation "greenroom" with transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.runtime.forward import experts_forward

IMPLEMENTATION = "greenroom"  # in the config of every model that Greenroom builds

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def set_experts_implementation(implementation: str, *modules: nn.Module) -> None:
    """Set the experts implementation of modules, such as "eager" or "greenroom".

    transformers' own method refuses models without its decorator `use_experts_implementation`, and
    models that wrap another model.
    """
    for module in modules:
        config: Any = module.config
        config._experts_implementation = implementation
