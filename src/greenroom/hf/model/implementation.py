"""The experts implementation "greenroom", as transformers knows it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.runtime.forward import experts_forward

IMPLEMENTATION = "greenroom"  # models are built with it

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def set_experts_implementation(implementation: str, *modules: nn.Module) -> None:
    """Have transformers compute experts modules by an implementation.

    transformers itself refuses classes that it did not decorate, and those of a model that wraps
    the one with the experts.
    """
    for module in modules:
        config: Any = module.config
        config._experts_implementation = implementation
