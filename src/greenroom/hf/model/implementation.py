"""The experts implementation "greenroom", registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.runtime.forward import experts_forward

IMPLEMENTATION = "greenroom"  # in the config of every model that Greenroom builds

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def set_experts_implementation(implementation: str, *modules: nn.Module) -> None:
    """Set transformers' experts implementation, such as "greenroom", of a model's experts modules.

    transformers' own method refuses classes that it did not decorate, and models that wrap the one
    with the experts.
    """
    for module in modules:
        config: Any = module.config
        config._experts_implementation = implementation
