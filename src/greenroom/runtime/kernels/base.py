"""Interface of the expert kernels: begin a layer's step, compute expert groups, sum outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class KernelStep:
    """One MoE layer's computation for some tokens: groups of experts, then their weighted sum.

    The bits of the result do not depend on how experts are grouped, on their order or on their
    slots.
    """

    __slots__ = ("layer", "residual", "routing", "weights", "x")
    supports_segments = False  # can segments of an expert be computed one after another?

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        """Start a layer's step for hidden states x [T, H] and gate weights [T, K]."""
        self.layer, self.x, self.routing, self.weights = layer, x, routing, weights
        self.residual: Tensor | None = None  # [T, H], added to the result

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute a group of experts from the memory slots that hold their weights.

        Ids are local to this layer.
        """
        raise NotImplementedError

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        accumulate: bool = False,
    ) -> None:
        """Compute experts from another layer's slots, without the sum over experts.

        layer: describes these slots: a segment of each expert, its copy in low precision, or the
               layer on another device
        accumulate: add to the outputs of earlier segments
        """
        self.compute_group(experts, slots)

    def total(self) -> Tensor:
        """Sum each token's expert outputs by ascending expert id: [T, H], in x's type."""
        raise NotImplementedError

    def combine(self) -> Tensor:
        """Return an MoE layer's output [T, H]: the sum over experts, plus the residual.

        It has x's type.
        """
        total = self.total()
        return total if self.residual is None else self.residual + total

    @property
    def main_step(self) -> KernelStep:
        """Return the layer's step on the first device, which sums the outputs of all devices."""
        return self

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        """Copy expert outputs from another device's step into this device's step.

        send: copies a tensor to this step's device
        """
        raise NotImplementedError

    def host_kernel(self, layer: LayerExperts) -> Kernel:
        """Return a host kernel whose expert outputs this device's step can merge.

        layer: the same layer in host memory
        """
        raise NotImplementedError

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Leave experts that are not computed out of the weighted sum."""


class Kernel:
    """A way to compute the experts of MoE layers, such as eager, compiled or Triton."""

    name: str
    # (step, experts, slots) -> job for the host's processor; None: computes in one place only.
    host_job: Callable[..., Callable[[], None]] | None = None

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        """Start to compute an MoE layer's experts for tokens x [T, H], weights [T, K]."""
        raise NotImplementedError

    def compute_group(self, step: Any, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute a group of experts from the memory slots that hold their weights.

        Ids are local to the step's layer.
        """
        step.compute_group(experts, slots)

    def combine(self, step: Any) -> Tensor:
        """Return an MoE layer's output [T, H], summed over experts, in the input's type."""
        result: Tensor = step.combine()
        return result

    def prepare(self, layer: LayerExperts) -> None:
        """Prepare a kernel to compute an MoE layer; called once, when a model is attached."""


class PooledKernel(Kernel):
    """A kernel around another one, for expert slots that lie in several memory pools.

    Slot s is slot s // `pools` of its pool.
    """

    def __init__(self, kernel: Kernel, pools: int = 1) -> None:
        self.kernel, self._pools = kernel, pools
        self.name = kernel.name

    def pool_slots(self, slots: Sequence[int]) -> list[int]:
        """Convert slot numbers to numbers within the memory pool that holds the slots."""
        return [slot // self._pools for slot in slots]
