"""Estimators of a model's speed, from its checkpoint's headers, its routing and a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli.terminal.progress import quiet
from greenroom.config import Amount, LoadConfig, changed_options
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.core.machine import Machine, Processor
    from greenroom.plan.model import Model
    from greenroom.plan.workload import Workload


def described(source: str, config: LoadConfig, gpu: bool = False) -> Model:
    """Return the sizes and shape of a model, read from its checkpoint's headers.

    `gpu`: whether a GPU computes, so that memory means memory of the GPU.
    """
    from greenroom.hf.load.describe import describe

    quiet()
    return describe(source, config, gpu)


def workload_of(trace: Path | None, model: Model) -> Workload:
    """Return the routing with which a model's speed is estimated.

    The routing comes from the file `trace`, else from earlier runs; it is synthetic if there are
    too few runs. TraceError if the file is of another model.
    """
    from greenroom.plan.history.files import load_routing
    from greenroom.plan.history.recent import recent_trace
    from greenroom.plan.workload import earlier_workload, recorded_workload, synthetic_workload
    from greenroom.trace import load

    if trace is not None:
        return recorded_workload(load(trace), model, str(trace))
    trace_of_runs = recent_trace(load_routing(model.fingerprint), model.experts_per_layer)
    return earlier_workload(trace_of_runs) or synthetic_workload(model)


def estimator_of(
    model: Model,
    machine: Machine,
    workload: Workload,
    config: LoadConfig,
    processor: Processor | None = None,
    host_memory: str | int | None = None,
    co_compute: bool = False,
) -> Any:
    """Return a model's speed estimator, and the number of measured runs that calibrated it.

    processor:   processor of the machine that computes (default: its first)
    host_memory: value of --host-memory, the memory of the host that caches experts for a GPU
    co_compute:  whether to also estimate settings in which the host computes misses of the GPU

    UsageError if `co_compute` or `host_memory` does not suit the machine.
    """
    from greenroom.core.machine import machine_name
    from greenroom.plan.costs import calibrated_costs, machine_costs, throttled_costs
    from greenroom.plan.estimate import Estimator
    from greenroom.plan.history.files import load_records

    runs = load_records(model.fingerprint, machine_name(machine.host)).runs
    computing = processor or machine.processors[0]
    first = computing == machine.processors[0]  # the runs were on this one
    costs = machine_costs(machine, model, config.readers, computing.name)
    if first:
        costs = calibrated_costs(costs, model, runs)
    host = host_slots(model, machine, costs, host_memory)
    if co_compute and not (host and costs.host is not None):
        raise UsageError(
            "--co-compute auto needs experts in host memory and a GPU that computes: give"
            " --host-memory, and a GPU of the machine's profile with --processor"
        )
    limit = None
    if config.read_limit is not None:
        limit = Amount.parse(config.read_limit, "--read-limit").nbytes
    costs = throttled_costs(costs, limit, model.expert_bytes)
    measured = bool(runs) and first
    options = changed_options(config)
    estimator = Estimator(
        model, costs, workload, measured=measured, host=host, co_compute=co_compute,
        precision=options.get("miss_precision", "off"), low_below=options.get("low_below"),
    )  # fmt: skip
    return estimator, len(runs) if measured else 0


def host_slots(model: Model, machine: Machine, costs: Costs, memory: str | int | None) -> int:
    """Return the number of experts that host memory can cache between disk and GPU.

    `memory` is the value of --host-memory; None means 80 % of the free memory, as in a run. The
    number is 0 if no GPU computes. UsageError if `memory` is given and no GPU computes.
    """
    if memory is None and len(costs.links) != 2:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-memory is for a GPU, but the processor that computes has no memory of its own:"
            " leave out --host-memory, or name a GPU of the machine's profile with --processor"
        )
    total = int(machine.host.get("memory_bytes", 0))
    if memory is None:
        from greenroom.hf.memory.budget import AUTO_SHARE

        free = int(machine.host.get("available_bytes") or total)
        return min(model.experts, int(AUTO_SHARE * free) // model.slot_bytes)
    return min(model.experts, Amount.parse(memory, "--host-memory").of(total) // model.slot_bytes)
