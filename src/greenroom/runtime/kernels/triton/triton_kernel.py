"""The default expert kernel on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from greenroom.runtime.kernels import eager
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton.kernel import TritonStep, fallback_reason
from greenroom.runtime.kernels.triton.plan import plan_of
from greenroom.runtime.kernels.triton.token_launches import ThreadTokenLaunches

if TYPE_CHECKING:  # it imports kernels
    from greenroom.runtime.cuda.slot_table import SlotTable


class TritonKernel(Kernel):
    """The expert kernel on a GPU, `kernels="triton"`.

    It runs on a CPU only under Triton's interpreter.
    """

    name = "triton"

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> TritonStep | eager.EagerStep:
        if fallback_reason(layer) is not None or x.dtype is not layer.dtype:
            return eager.EagerStep(layer, x, routing, weights)
        return TritonStep(layer, plan_of(layer), x, routing, weights)

    def supports(self, layer: LayerExperts) -> bool:
        return fallback_reason(layer) is None

    def token_launches(
        self, layer: LayerExperts, table: SlotTable, first: int
    ) -> ThreadTokenLaunches | None:
        return ThreadTokenLaunches(layer, table, first) if self.supports(layer) else None
