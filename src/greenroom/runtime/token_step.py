"""Steps of one token whose experts a device finds in slots by itself.

A `binding` is the `Binding` of an experts module (`forward.py`); `launches` are its layer's
`TokenLaunches`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from greenroom.core.predictor import LayerRouting
from greenroom.runtime.cuda.token_graph import active_graph
from greenroom.runtime.driver.device_steps import ComputedStep

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
    result = driver.device_steps.launch(partial(launches.start, x, top_k_index, top_k_weights))
    if serve_token(binding, launches, binding.overlapped_work):
        return launches.result()
    if driver.predictions.predicts:  # predictions must not be late
        driver.deferred.settle()
    return result


def serve_token(
    binding: Binding, launches: Any, overlapped_work: Callable[[], object] | None = None
) -> bool:
    """Read what a token's launched look-up has found, and launch the experts that it misses.

    Returns whether any was missing. If none was, the scheduler observes the step later.
    """
    driver = binding.driver
    if driver.scheduler.resident_steps.path is None:  # else steps are served together
        driver.deferred.settle()
    report = launches.read_report()
    missing = launches.missing(report)
    observe = partial(_observe, binding, launches, report)
    serve = partial(_serve, binding, launches, report, missing, observe, overlapped_work)
    note = partial(_note, binding, launches, report)
    if not missing:
        experts = partial(launches.experts, report)
        driver.deferred.add(ComputedStep(binding.layer, experts, observe, serve, note))
        return False
    driver.deferred.settle()
    load = partial(launches.start_again, [*missing])
    if not driver.device_steps.load(binding.layer, launches.experts(report), load, observe):
        serve()
    note()  # the device need not wait for it
    return True


def _note(binding: Binding, launches: Any, report: list[int]) -> None:
    """Tell observers which experts a token chose."""
    if binding.on_routing is not None:
        binding.on_routing(binding.layer, launches.choice(report))


def _observe(binding: Binding, launches: Any, report: list[int], inputs: bool) -> LayerRouting:
    """Return a token's routing for the predictor, with the router's inputs if `inputs` is true."""
    captured = binding.router_inputs(inputs) if binding.router_inputs else None
    return LayerRouting(binding.layer, launches.choice(report), inputs=captured)


def _serve(
    binding: Binding,
    launches: Any,
    report: list[int],
    missing: set[int],
    observe: Callable[[bool], LayerRouting],
    overlapped_work: Callable[[], object] | None,
) -> None:
    """Let the scheduler serve a token's step, and launch the experts that it loads."""
    driver, experts = binding.driver, launches.experts(report)
    share: Any = None  # of the host's processor

    def prepare_host_job(experts: Any, slots: Any) -> Callable[[], None]:
        nonlocal share
        if share is None:
            share = binding.kernel.token_share(binding.experts, launches, report)
        return partial(share.compute, experts.tolist(), slots.tolist())

    def compute_group(experts: Any, slots: Any) -> None:
        group = experts.tolist()
        if not missing.isdisjoint(group):
            launches.start_again(group, slots.tolist())
            missing.difference_update(group)

    shares = missing and binding.kernel.host_job is not None and not driver.deferred.without_host
    driver.step(
        binding.layer,
        np.array(experts, np.int64),
        compute_group,
        observe_routing=observe,
        overlapped_work=overlapped_work,
        prepare_host_job=prepare_host_job if shares else None,
        computed=[expert for expert in experts if expert not in missing] if missing else (),
    )
    if share is not None:
        share.merge_into_token(launches)
