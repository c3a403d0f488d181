"""What estimates a model's runs: its headers, its routing, a machine's costs."""

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
    """Sizes and shape, of headers."""
    from greenroom.hf.load.describe import describe

    quiet()
    return describe(source, config, gpu)


def workload_of(trace: Path | None, model: Model) -> Workload:
    """The recording that was given, else what earlier runs left, else stand-ins. TraceError where
    it is another model's."""
    from greenroom.plan.history.files import load_routing
    from greenroom.plan.history.recent import recent_trace
    from greenroom.plan.workload import earlier_workload, recorded_workload, synthetic_workload
    from greenroom.trace import load

    if trace is not None:
        return recorded_workload(load(trace), model, str(trace))
    own = recent_trace(load_routing(model.fingerprint), model.experts_per_layer)
    return earlier_workload(own) or synthetic_workload(model)


def estimator_of(
    model: Model,
    machine: Machine,
    workload: Workload,
    config: LoadConfig,
    processor: Processor | None = None,
    host_memory: str | int | None = None,
    co_compute: bool = False,
) -> Any:
    """(what estimates, runs of this model on the machine that its costs go by). `processor`
    computes, the first without one; with `co_compute`, also settings where the host's does."""
    from greenroom.core.machine import name_of
    from greenroom.plan.costs import calibrated_costs, machine_costs, throttled_costs
    from greenroom.plan.estimate import Estimator
    from greenroom.plan.history.files import load_records

    runs = load_records(model.fingerprint, name_of(machine.host)).runs
    computing = processor or machine.processors[0]
    first = computing == machine.processors[0]  # whose the runs were
    costs = machine_costs(machine, model, config.readers, computing.name)
    if first:
        costs = calibrated_costs(costs, model, runs)
    host = host_slots(model, machine, costs, host_memory)
    if co_compute and not (host and costs.host is not None):
        raise UsageError(
            "--co-compute auto needs experts in host memory (--host-memory), and a machine with a"
            " processor there and one behind it (--processor)"
        )
    limit = None
    if config.read_limit is not None:
        limit = Amount.parse(config.read_limit, "--read-limit").nbytes
    costs = throttled_costs(costs, limit, model.expert_bytes)
    measured = bool(runs) and first
    options = changed_options(config)
    made = Estimator(
        model, costs, workload, measured=measured, host=host, co_compute=co_compute,
        precision=options.get("miss_precision", "off"), low_below=options.get("low_below"),
    )  # fmt: skip
    return made, len(runs) if measured else 0


def host_slots(model: Model, machine: Machine, costs: Costs, memory: str | int | None) -> int:
    """Experts that are kept between two links, without an amount as many as a run keeps there;
    UsageError where one is given, and there are not two."""
    if memory is None and len(costs.links) != 2:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-memory is of memory between two links, disk to host to device: give the"
            " --processor behind it"
        )
    whole = int(machine.host.get("memory_bytes", 0))
    if memory is None:
        from greenroom.hf.memory.budget import AUTO_SHARE

        free = int(machine.host.get("available_bytes") or whole)
        return min(model.experts, int(AUTO_SHARE * free) // model.slot_bytes)
    return min(model.experts, Amount.parse(memory, "--host-memory").of(whole) // model.slot_bytes)
