"""Steps of one token whose experts a device finds in slots by itself.

A `binding` is the `Binding` of an experts module (`forward.py`); `launches` are its layer's
`TokenLaunches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from greenroom.core.predictor import LayerRouting
from greenroom.runtime.cuda.token_graph import active_graph

if TYPE_CHECKING:  # it calls `token_step`
    from greenroom.runtime.forward import Binding


def token_step(
    binding: Binding, launches: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute one token's experts on a device, which finds those in slots by itself.

    launches: the layer's `TokenLaunches`

    The host reads the choice after the launches. If all experts were in slots, the scheduler
    observes the step while the device computes later layers; else now, since it must load some.
    """
    if (graph := active_graph()) is not None:  # of the whole token
        make = partial(binding.token_launches.of_graph, top_k_index, top_k_weights)
        return graph.launch_experts(binding.layer, make, x, top_k_index, top_k_weights)
    driver = binding.driver
    result = driver.device_steps.launch(launches.start, x, top_k_index, top_k_weights)
    if serve_token(binding, launches, binding.overlapped_work):
        return launches.result()
    if driver.predictions.predicts:  # predictions must not be late
        driver.deferred.settle()
    return result


def serve_token(
    binding: Binding,
    launches: Any,
    overlapped_work: Callable[[], object] | None = None,
    then: Callable[[], None] | None = None,
) -> bool:
    """Read what a token's launched look-up has found, and launch the experts that it misses.

    then: launches the token's next work; called behind these launches, if at once

    Returns whether any was missing. If none was, the scheduler observes the step later.
    """
    driver = binding.driver
    deferred = driver.deferred  # of this thread
    if driver.scheduler.resident_steps.path is None:  # else steps are served together
        deferred.settle()
    step = _LayerStep(binding, launches, overlapped_work)
    if not step.report.misses:
        deferred.add(step)
        return False
    deferred.settle()
    if not driver.device_steps.load(step, then):
        step.serve()
    step.note()  # the device need not wait for it
    return True


class _LayerStep:
    """One layer's step of a token, which a device has computed from slots."""

    __slots__ = (
        "_binding",
        "_overlapped_work",
        "_share",
        "launches",
        "layer",
        "report",
    )

    def __init__(
        self, binding: Binding, launches: Any, overlapped_work: Callable[[], object] | None
    ) -> None:
        """Wait for the report of the look-up."""
        self._binding, self.launches, self._overlapped_work = binding, launches, overlapped_work
        self.layer, self.report = binding.layer, launches.read_report()
        self._share: Any = None  # of the host's processor

    @property
    def device_only(self) -> bool:
        binding = self._binding
        return binding.kernel.host_job is None or binding.driver.deferred.without_host

    def send_inputs(self) -> None:
        binding = self._binding
        self._share = binding.kernel.token_share(binding.experts, self.launches)

    def compute_on_host(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        self._share.compute(experts, slots)
        self._share.merge_into(self.launches, self.report)

    def observe(self, inputs: bool) -> LayerRouting:
        binding = self._binding
        captured = binding.router_inputs(inputs) if binding.router_inputs else None
        return LayerRouting(self.layer, self.report.by_rank[None], inputs=captured)

    def note(self) -> None:
        if (observe := self._binding.on_routing) is not None:
            observe(self.layer, self.report.by_rank[None])

    def serve(self) -> None:
        binding, launches, missing = self._binding, self.launches, {*self.report.missing}
        driver = binding.driver
        experts = self.report.pieces - driver.pieces.offsets[self.layer]

        def prepare_host_job(experts: Any, slots: Any) -> Callable[[], None]:
            if self._share is None:
                self.send_inputs()
            return partial(self._share.compute, experts.tolist(), slots.tolist())

        def compute_group(experts: Any, slots: Any) -> None:
            group = experts.tolist()
            if not missing.isdisjoint(group):
                launches.start_again(group, slots.tolist())
                missing.difference_update(group)

        driver.step(
            self.layer,
            experts,
            compute_group,
            observe_routing=self.observe,
            overlapped_work=self._overlapped_work,
            prepare_host_job=None if self.device_only or not missing else prepare_host_job,
            computed=[e for e in experts.tolist() if e not in missing] if missing else (),
            by_table=True,
        )
        if self._share is not None:
            driver.device_steps.launch(self._share.merge_into, launches, self.report)
