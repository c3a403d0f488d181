"""ggml's arithmetic in torch, to measure how far its results are from exact products.

ggml rounds the inputs of a product to a type that belongs to the matrix's type (`vec_dot_type`):
blocks of 8-bit integers with one scale for quantised matrices, 16-bit floats for 16-bit matrices.
Here products have decoded weights and inputs that are rounded in this way, in float32. The other
operations are the model's own in float32. ggml's rounding of keys, values and queries to float16,
and of the sums in Q8_1 blocks, is left out: both are finer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from greenroom.core.layout import BLOCKS, MIXED, PLAIN, WeightSpec
from greenroom.hf.model.skeleton import ModelSkeleton, conversions_of
from greenroom.runtime.forward import BINDING, Binding
from greenroom.runtime.kernels.eager import EagerKernel, EagerStep
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing

Rounding = Callable[[Tensor], Tensor]

_PRODUCTS = {linear, torch.bmm, torch.matmul, Tensor.matmul}  # of (inputs, weights)
_LARGE = 256  # inputs of a Q8_K block; types with such blocks take Q8_K inputs
_LARGEST = 127  # integer


def round_q8_0(x: Tensor) -> Tensor:
    """Round inputs to Q8_0: integers of 8 bits, 32 with one scale in float16.

    The scale is rounded after the division, as in ggml. Q8_1 has the same integers and scale.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * _reciprocal(largest)).round()
    return (codes * (largest / _LARGEST).half().float()).flatten(-2)


def round_q8_k(x: Tensor) -> Tensor:
    """Round inputs to Q8_K: integers of 8 bits, 256 with one scale in float32."""
    blocks = x.float().unflatten(-1, (-1, _LARGE))
    scale = _reciprocal(blocks.abs().amax(-1, keepdim=True))
    return torch.where(scale > 0, (blocks * scale).round() / scale, 0).flatten(-2)


def _reciprocal(largest: Tensor) -> Tensor:
    """Return what multiplies a block's inputs to make integers; 0 for a block of zeros."""
    return torch.where(largest > 0, _LARGEST / largest, 0)


def rounding_of(encoding: str, dtype: str = "") -> Rounding | None:
    """Return how ggml rounds the inputs of products with a matrix; None if it does not.

    encoding: the matrix's encoding; of a mixed one the first counts
    dtype:    the type of a plain matrix
    """
    if encoding == PLAIN:
        stored: torch.dtype = getattr(torch, dtype)
        return None if stored is torch.float32 else lambda x: x.to(stored).float()
    return round_q8_k if BLOCKS[encoding.split(MIXED)[0]][0] == _LARGE else round_q8_0


class GgmlInputs(TorchFunctionMode):
    """Context in which products with registered weights round their inputs as ggml does.

    What is computed from a registered weight, such as a part or its transpose, is registered too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._roundings = WeakTensorKeyDictionary()

    def register(self, weight: Tensor, encoding: str, dtype: str) -> None:
        """Round the inputs of all products with a weight, which is stored in an encoding."""
        if (rounding := rounding_of(encoding, dtype)) is not None:
            self._roundings[weight] = rounding

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; a product with a registered weight has rounded inputs."""
        if func in _PRODUCTS and len(args) > 1:
            inputs, weight, *others = args
            if weight in self._roundings:
                inputs = self._roundings[weight](inputs)
            return func(inputs, weight, *others, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor) and args[0] in self._roundings:
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, Tensor):
                    self._roundings[part] = self._roundings[args[0]]
        return result


class _GgmlStep(EagerStep):
    """One MoE layer's computation with inputs that are rounded as ggml does."""

    __slots__ = ("inputs",)
    inputs: GgmlInputs

    def matrix(self, layer: LayerExperts, slot: int, weight: WeightSpec) -> Tensor:
        matrix = super().matrix(layer, slot, weight)
        self.inputs.register(matrix, weight.encoding, weight.parts[0].dtype)
        return matrix


class _GgmlKernel(EagerKernel):
    name = "ggml"

    def __init__(self, inputs: GgmlInputs) -> None:
        self._inputs = inputs

    def begin(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> _GgmlStep:
        step = _GgmlStep(layer, x, routing, weights)
        step.inputs = self._inputs
        return step


@contextmanager
def ggml_arithmetic(model: PreTrainedModel, skeleton: ModelSkeleton) -> Iterator[None]:
    """Context in which a model's matrix products round their inputs as ggml does.

    model:    has streamed experts, eager kernels and the dtype float32
    skeleton: the same model without weights

    A weight that is made of several tensors of the checkpoint counts as stored like the first.
    """
    inputs = GgmlInputs()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    conversions, _ = conversions_of(skeleton.model, skeleton.checkpoint)
    for target, conversion in conversions.items():
        stored = skeleton.checkpoint.tensors[next(iter(conversion.sources.values()))[0]]
        if target in parameters and parameters[target].dim() == 2:
            inputs.register(parameters[target], stored.encoding, stored.dtype)
    for module in model.modules():
        if (binding := module.__dict__.get(BINDING)) is not None:
            assert isinstance(binding, Binding)
            setattr(module, BINDING, replace(binding, kernel=_GgmlKernel(inputs), resident={}))
    with inputs:
        yield
