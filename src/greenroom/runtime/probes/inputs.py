"""Capture of the hidden states that enter a model's routers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from greenroom.core.predictor import Inputs
from greenroom.runtime.kernels.dense.module_check import InputHook
from greenroom.runtime.probes.routers import Router


class GateInputProbe:
    """Forward pre-hooks that capture the latest input of each of a model's MoE routers.

    hooks: one for each router; they stay until `detach`
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self._inputs: list[Tensor | None] = [None] * len(routers)
        layers = range(len(routers))
        self.hooks = [InputHook(partial(self._inputs.__setitem__, layer)) for layer in layers]
        self._handles = [
            router.module.register_forward_pre_hook(hook, with_kwargs=True)
            for router, hook in zip(routers, self.hooks, strict=True)
        ]

    def take_tensor(self, layer: int) -> Tensor:
        """Return and forget a router's latest captured input, a tensor [tokens, hidden].

        Raises ValueError if the router was not called since the previous input was taken.
        """
        hidden, self._inputs[layer] = self._inputs[layer], None
        if hidden is None:
            raise ValueError(
                f"no input of the router of layer {layer} was captured: its forward was not called"
            )
        return hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])

    def take_if_captured(self, layer: int, copy: bool = True) -> Inputs | None:
        """Return and forget a router's latest captured input; None if there is none.

        The experts of a layer may be called without its router. Without `copy` the input is only
        forgotten, so that its memory is free.
        """
        if not copy:
            self._inputs[layer] = None
        return None if self._inputs[layer] is None else self.take_array(layer)

    def take_array(self, layer: int) -> Inputs:
        """Return and forget a router's latest captured input, float32 [tokens, hidden].

        Raises ValueError if the router was not called since the previous input was taken.
        """
        return _floats(self.take_tensor(layer))

    def detach(self) -> None:
        """Remove the hooks from a model's routers, and drop captured inputs.

        A second call does nothing.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inputs[:] = [None] * len(self._inputs)


def _floats(hidden: Tensor) -> Inputs:
    """Convert hidden states [tokens, hidden] to float32.

    torch's operations let other threads have Python's lock, so those of one token take ten times
    as long while experts are read.
    """
    if len(hidden) == 1 and hidden.dtype is torch.bfloat16 and hidden.is_cpu:
        memory = (ctypes.c_uint16 * hidden.shape[1]).from_address(hidden.contiguous().data_ptr())
        bits = np.frombuffer(memoryview(memory), np.uint16).astype(np.uint32)
        converted: Inputs = (bits << 16).view(np.float32)[None]
        return converted
    values: Inputs = hidden.detach().to("cpu", torch.float32).numpy()
    return values
