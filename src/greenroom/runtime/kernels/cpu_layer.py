"""Constant arguments of the compiled CPU kernels for one MoE layer."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from greenroom.core.layout import PLAIN
from greenroom.runtime.kernels.activation import RAW, Activation, find_activation
from greenroom.runtime.kernels.launch.openmp import KernelEntry, kernel_entry
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.matrix import products_of
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.recipes import Recipe

SCRATCH_BYTES = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class CpuLayerPlan:
    """The compiled kernel entries and constant arguments of one MoE layer on the CPU.

    experts: the layer's experts as kernels read them (native/experts.hpp)
    scratch: bytes of scratch memory that a thread needs
    up_planes, down_planes: planes of packed input rows (`MatrixProduct`) of the projections; 0:
                            none is packed
    sums_in_region: may one token's last group be summed in the parallel region that computes it?
    group_template, sum_template, norm_template: calls with the fields of every step
    multiplies_pairs: bfloat16 matrices take rows of inputs as they are (native/pairs.hpp)
    """

    __slots__ = (
        *("activation", "experts", "group_entry", "matrices", "kernels", "norm_entry", "scratch"),
        *("down_bias", "group_type", "routing_type", "sum_entry", "sum_type", "up_bias"),
        *("down_planes", "up_planes", "group_template", "sum_template", "sums_in_region"),
        *("multiplies_pairs", "norm_template", "norm_type", "_recipe", "_rounding"),
    )

    def __init__(self, layer: LayerExperts, kernels: str = "native") -> None:
        self.activation: Activation = find_activation(layer)
        self.kernels = kernels
        weights = layer.up_weight, layer.down_weight
        encoded = any(weight.encoding != PLAIN for weight in weights)
        self.group_entry: KernelEntry = kernel_entry("compute_group", layer.dtype)
        self.sum_entry: KernelEntry = kernel_entry("sum_experts", layer.dtype)
        self.norm_entry: KernelEntry = kernel_entry("add_and_norm", layer.dtype)
        products = [products_of(w, layer.dtype, kernels) for w in weights] if encoded else []
        self.matrices = [products[0][0], products[1][0], products[0][1]] if encoded else []
        self.up_planes = max((each.planes for each in self.matrices[::2]), default=0)
        self.down_planes = self.matrices[1].planes if encoded else 0
        assert len({each.planes for each in self.matrices} - {0}) <= 1  # inputs are packed once
        plain = not encoded and not layer.transposed
        pairs = plain or (encoded and all(each.bfloat16 for each in self.matrices[::2]))
        self.multiplies_pairs = bool(pairs) and layer.dtype is torch.bfloat16
        self.up_bias, self.down_bias = layer.up_bias, layer.down_bias
        structure = library().structure
        self.group_type, self.sum_type = structure("GroupCall"), structure("SumCall")
        self.routing_type = structure("Routing")
        address = library().address("expert_scratch_bytes")
        self.scratch: int = SCRATCH_BYTES(address)(layer.hidden, layer.inner)
        experts = self.experts = structure("ExpertLayer")(
            slots=layer.slots.address(0),
            slot_bytes=layer.slots.stride,
            hidden=layer.hidden,
            inner=layer.inner,
            width=layer.width,
            interleaved=layer.interleaved,
            transposed=layer.transposed and not encoded,
            rounds=layer.recipe.compute is None,
            bias=None if self.up_bias is None else self.up_bias.data_ptr(),
        )
        for name in ("code", "limit", "alpha"):
            setattr(experts.activation, name, getattr(self.activation, name))
        experts.up.offset = experts.second.offset = layer.up.offset
        experts.down.offset = layer.down.offset
        places = experts.up, experts.down, experts.second
        for place, matrix in zip(places, self.matrices, strict=bool(encoded)):
            place.format, place.layout = matrix.arguments
        self.sums_in_region = self.activation.code != RAW and layer.norm is None
        self.norm_type = structure("NormCall")
        self.norm_template = self.norm_type(columns=layer.hidden)
        self.group_template = self.group_type(layer=ctypes.addressof(experts))
        bias = None if layer.norm is not None else self.down_bias
        self.sum_template = self.sum_type(
            hidden=layer.hidden,
            bias=None if bias is None else bias.data_ptr(),
            rounds=layer.recipe.compute is None,
        )
        self._recipe: Recipe = layer.recipe
        self._rounding: dict[tuple[torch.dtype, torch.dtype], tuple[bool, bool]] = {}

    def sum_rounding(self, x: Tensor, weights: Tensor) -> tuple[bool, bool]:
        """Are products with gate weights rounded to the type of x, and are sums?"""
        key = x.dtype, weights.dtype
        if key not in self._rounding:
            rounds, dtype = self._recipe.compute is None, self._recipe.sum_dtype(x, weights)
            product = x.dtype if rounds and weights.dtype == x.dtype else torch.float32
            self._rounding[key] = x.dtype in (product, dtype), dtype == x.dtype
        return self._rounding[key]


def layer_plan(layer: LayerExperts, kernels: str = "native") -> CpuLayerPlan:
    """Return an MoE layer's compiled CPU entries and arguments, built at the first call.

    kernels: native, precise or rounded (matrix.py)
    """
    if not isinstance(layer.plan, CpuLayerPlan) or layer.plan.kernels != kernels:
        layer.plan = CpuLayerPlan(layer, kernels)
    return layer.plan
