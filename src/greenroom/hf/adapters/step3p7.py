"""Adapter for Step 3.7, which lacks only transformers' `use_experts_implementation`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from greenroom.hf.adapters.helpers.experts_interface import (
    Adapter,
    decorate,
    set_interface_attributes,
)


def adapt(experts: Any, model: PreTrainedModel) -> None:
    kind: Any = type(experts)
    experts.__class__ = decorate(kind)
    set_interface_attributes(experts, model)


ADAPTER = Adapter("Step3p7Experts", adapt)
