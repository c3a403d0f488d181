"""Interface of the expert kernels: begin a step, compute its experts in groups, sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class KernelStep:
    """One step of one layer: groups of experts that together cover the step, then `combine`.

    The bits of the result do not depend on how experts are grouped, on their order or on their
    slots.
    """

    __slots__ = ("layer", "residual", "routing", "weights", "x")
    supports_segments = False  # can segments of an expert be computed one after another?

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        """x [T, H], weights [T, K]."""
        self.layer, self.x, self.routing, self.weights = layer, x, routing, weights
        self.residual: Tensor | None = None  # [T, H], added to the result

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts (local ids) from the slots that hold them."""
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
        """Sum each token's experts by ascending id: [T, H], in x's type."""
        raise NotImplementedError

    def combine(self) -> Tensor:
        """Return the step's result [T, H], in x's type: the sum over experts, plus the residual."""
        total = self.total()
        return total if self.residual is None else self.residual + total

    @property
    def main_step(self) -> KernelStep:
        """Step on the first device, which takes the sum."""
        return self

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        """Copy these experts' outputs from a step on another device into this one.

        send: copies a tensor to this step's device
        """
        raise NotImplementedError

    def host_kernel(self, layer: LayerExperts) -> Kernel:
        """Return a kernel on the host whose steps' outputs this step can merge.

        layer: the same layer in host memory
        """
        raise NotImplementedError

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Leave experts that are not computed out of the sum."""


class Kernel:
    """An implementation of expert layers, which computes steps."""

    name: str
    # (step, experts, slots) -> job for the host's processor; None: computes in one place only.
    host_job: Callable[..., Callable[[], None]] | None = None

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        """Start a step: x [T, H], weights [T, K]."""
        raise NotImplementedError

    def compute_group(self, step: Any, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts (local ids) of the step from the slots that hold them."""
        step.compute_group(experts, slots)

    def combine(self, step: Any) -> Tensor:
        """Return the step's result [T, H], in x's type."""
        result: Tensor = step.combine()
        return result

    def prepare(self, layer: LayerExperts) -> None:
        """Prepare to compute a layer; called once, when a model is attached."""


class PooledKernel(Kernel):
    """A kernel around another one, for slots of several pools.

    Slot s is slot s // `pools` of its pool.
    """

    def __init__(self, kernel: Kernel, pools: int = 1) -> None:
        self.kernel, self._pools = kernel, pools
        self.name = kernel.name

    def pool_slots(self, slots: Sequence[int]) -> list[int]:
        """Return the slots' numbers in their pool."""
        return [slot // self._pools for slot in slots]
