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

    The bits of the result do not depend on the grouping of the experts, on their order or on the
    memory slots that hold their weights.
    """

    __slots__ = ("layer", "residual", "routing", "weights", "x")
    supports_segments = False  # can segments of an expert be computed one after another?

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        """Start an MoE layer's step for hidden states x [T, H] and gate weights [T, top_k]."""
        self.layer, self.x, self.routing, self.weights = layer, x, routing, weights
        self.residual: Tensor | None = None  # [T, H], added to the result

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute a group of experts from the memory slots that hold their weights.

        Expert ids are local to the step's layer; `slots` has one slot number for each expert.
        """
        raise NotImplementedError

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        accumulate: bool = False,
    ) -> None:
        """Compute experts from the slots of another `LayerExperts`, without summing outputs.

        layer: describes the slots, which hold a segment of each expert, its low-precision copy,
               or the layer's experts on another device
        accumulate: add to the outputs of earlier segments of the same experts
        """
        self.compute_group(experts, slots)

    def total(self) -> Tensor:
        """Return the sums of each token's weighted expert outputs: [T, H], in the input's type.

        Outputs are added in ascending order of the experts' ids.
        """
        raise NotImplementedError

    def combine(self) -> Tensor:
        """Return an MoE layer's output [T, H] in the input's type.

        It is the weighted sum over experts, plus the residual if the step has one.
        """
        total = self.total()
        return total if self.residual is None else self.residual + total

    @property
    def main_step(self) -> KernelStep:
        """Return the layer's step on the first device, which sums the outputs of all devices."""
        return self

    def leave_sum(self) -> None:
        """Leave the sum over experts to another device's step, which merges this one's outputs."""

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        """Copy the outputs of some experts from another device's step into this device's step.

        `send` copies a tensor to the device of this step.
        """
        raise NotImplementedError

    def outputs_of(self, experts: Sequence[int]) -> Tensor:
        """Return the outputs [n, H] of experts for their tokens, expert by expert, with biases.

        Gate weights and the layer's post-expert norm are not applied.
        """
        raise NotImplementedError

    def host_kernel(self, layer: LayerExperts) -> Kernel:
        """Return a kernel for the host's processor whose expert outputs this step can merge.

        `layer` describes the same experts in host memory.
        """
        raise NotImplementedError

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Leave the given experts, which are not computed, out of the weighted sum."""


class Kernel:
    """A way to compute the experts of MoE layers, such as eager, compiled or Triton."""

    name: str
    # (step, experts, slots) -> job for the host's processor; None: computes in one place only.
    host_job: Callable[..., Callable[[], None]] | None = None

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> KernelStep:
        """Start to compute an MoE layer's experts for some tokens.

        Hidden states x are [T, H], gate weights [T, top_k].
        """
        raise NotImplementedError

    def compute_group(self, step: Any, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute a group of experts from the memory slots that hold their weights.

        Expert ids are local to the step's layer; `slots` has one slot number for each expert.
        """
        step.compute_group(experts, slots)

    def combine(self, step: Any) -> Tensor:
        """Return an MoE layer's output [T, H] in the input's type.

        It is the weighted sum over experts, plus the residual if the step has one.
        """
        result: Tensor = step.combine()
        return result

    def token_share(self, layer: LayerExperts, launches: Any) -> Any:
        """Return the host's share of one token's experts, if `host_job` is not None.

        launches: those of the device, see `token_launches`
        """
        raise NotImplementedError

    def supports(self, layer: LayerExperts) -> bool:
        """Check that this kernel, not the eager kernel, computes an MoE layer."""
        return True

    def prepare(self, layer: LayerExperts) -> None:
        """Set the kernel up for an MoE layer; called when a model is attached."""

    def token_launches(self, layer: LayerExperts, table: Any, first: int) -> Any:
        """Return the launches that compute one token's experts from a router's choice on a device.

        table: the `SlotTable` of the device, in which the layer's experts begin at `first`

        Returns None if the kernel cannot compute the layer without the choice on the host.
        """
        return None


class PooledKernel(Kernel):
    """A kernel that calls an inner kernel, for expert slots that alternate between memory pools.

    A pool is one block of memory that is cut into slots. Slot number s is slot s // `pools` of
    pool s % `pools`.
    """

    def __init__(self, kernel: Kernel, pools: int = 1) -> None:
        self.kernel, self._pools = kernel, pools
        self.name = kernel.name

    def pool_slots(self, slots: Sequence[int]) -> list[int]:
        """Convert slot numbers to numbers within the memory pool that holds the slots."""
        return [slot // self._pools for slot in slots]
