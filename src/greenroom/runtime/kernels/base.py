"""How a step's experts are computed: a kernel begins a step, groups compute it, a sum ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts


class KernelStep:
    """A step under way: any groups that cover its experts, then `combine`.

    The result has the same bits however the experts are split into groups, in which order they
    come and in which slots they lie.
    """

    __slots__ = ("layer", "residual", "routing", "weights", "x")
    supports_segments = False  # can pieces of an expert be computed one after the other?

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        """x [T, H], weights [T, K]."""
        self.layer, self.x, self.routing, self.weights = layer, x, routing, weights
        self.residual: Tensor | None = None  # [T, H], what the result is added to

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Compute experts (local ids) from the slots that hold them."""
        raise NotImplementedError

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        carry: bool = False,
    ) -> None:
        """The same where another step has the sum, or with other weights.

        layer: as these slots have it: a piece of each expert, its copy in low precision, or all
        carry: add to what the pieces before left, rather than start from nothing
        """
        self.compute_group(experts, slots)

    def total(self) -> Tensor:
        """The sum over each token's experts [T, H], in x's type, by ascending id."""
        raise NotImplementedError

    def combine(self) -> Tensor:
        """The step's result [T, H], in x's type."""
        total = self.total()
        return total if self.residual is None else self.residual + total

    @property
    def main_step(self) -> KernelStep:
        """The step on the first device, where the sum is taken."""
        return self

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        """Put what these experts gave in a step elsewhere beside what is in this one; `send` brings
        a tensor to this one's device."""
        raise NotImplementedError

    def host_kernel(self, layer: LayerExperts) -> Kernel:
        """What computes the same experts on the host, so that this step can take its outputs;
        `layer` is the layer there."""
        raise NotImplementedError

    def skip_experts(self, experts: Sequence[int]) -> None:
        """Nothing of these experts, which had no group, is in the sum."""


class Kernel:
    """What computes steps."""

    name: str
    # A group of the host's processor, for kernels that compute on a device and on the host at once.
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
        """The step's result [T, H], in x's type."""
        result: Tensor = step.combine()
        return result

    def prepare(self, layer: LayerExperts) -> None:
        """A layer will be computed, wherever its experts are; when a model is attached."""


class PooledKernel(Kernel):
    """Another kernel, over experts in slots of several pools: slot s is number s // `pools` of its
    pool."""

    def __init__(self, kernel: Kernel, pools: int = 1) -> None:
        self.kernel, self._pools = kernel, pools
        self.name = kernel.name

    def numbers(self, slots: Sequence[int]) -> list[int]:
        """The slots' numbers in their pool."""
        return [slot // self._pools for slot in slots]
