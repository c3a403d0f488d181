"""Tensors that transformers' loader gets without a copy: they are read when it asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.index.conversions import WeightConversion


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A placeholder for a tensor that is read from disk when it is indexed: `tensor[...]`.

    `dtype` is safetensors' name of the type, "" if unknown.
    """

    read: Callable[[], torch.Tensor]
    dtype: str = ""

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.read()

    def get_dtype(self) -> str:
        return self.dtype


def decode_gguf(
    checkpoint: GgufCheckpoint,
    conversion: WeightConversion,
    names: list[str],
    model: PreTrainedModel,
    dtype: torch.dtype,
    empty: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Make a model parameter from tensors of a GGUF file."""
    if conversion.converter is None:
        return checkpoint.read(names[0], dtype, empty)
    # As in transformers, conversions compute in float32, and the result is cast.
    tensors = {name: checkpoint.read(name, torch.float32) for name in names}
    (target,) = conversion.targets
    parameter = conversion.convert(tensors, model, model.config)[target]
    return empty(*parameter.shape, dtype=dtype).copy_(parameter)
