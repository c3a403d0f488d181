"""What times of a trace need to know of a machine: its costs, and its memory between links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenroom.cli.estimate.machine import profile
from greenroom.config import Amount, BudgetsConfig, SimulateConfig
from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.trace import Trace


def timing(config: SimulateConfig, trace: Trace) -> dict[str, Any]:
    """The costs of this trace's model on the machine of the profile; nothing without one."""
    if config.machine is None:
        return {}
    from greenroom.core.homes import homes

    costs, expert = costs_of(config, trace, processor=config.processor, store=config.store)
    homes(trace.offsets.tolist(), config.devices)  # or UsageError
    check_host(config, costs)
    return {
        "costs": costs,
        "expert_bytes": expert,
        "host": host_slots(config, trace, costs),
        "devices": config.devices,
    }


def costs_of(
    config: SimulateConfig | BudgetsConfig, trace: Trace, **places: str | None
) -> tuple[Costs, int]:
    """(what the machine of the profile takes, an expert's bytes); UsageError where nobody says how
    large an expert is."""
    assert config.machine is not None
    expert = nbytes(config.expert_bytes, trace, "expert_bytes")
    machine = profile(config.machine)
    if not expert:
        raise UsageError(
            "the trace does not say how large an expert is: give --expert-bytes, such as 12MiB"
        )
    dense = nbytes(config.dense_bytes, trace, "dense_bytes")
    return machine.costs(expert, dense, **places), expert


def check_host(config: SimulateConfig, costs: Costs) -> None:
    """UsageError where misses shall be computed where they wait, and nobody could."""
    if not config.uses_host():
        return
    if config.host_capacity is None:
        raise UsageError("--co-compute auto computes what host memory keeps: give --host-capacity")
    if costs.host is None:
        raise UsageError(
            "--co-compute auto needs two processors, one beside host memory and --processor behind"
            " it: this machine's profile has none there"
        )


def host_slots(config: SimulateConfig, trace: Trace, costs: Costs) -> int:
    """Slots of the tier between two links; UsageError where there are not two."""
    from greenroom.sim.study import capacities

    if config.host_capacity is None:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-capacity is of memory between two links, disk to host to device: this way to"
            f" the processor has {len(costs.links)}"
        )
    slots = capacities(config.host_capacity, int(trace.offsets[-1]))
    if len(slots) != 1:
        raise UsageError(f"--host-capacity is one number, got {config.host_capacity}")
    return slots[0]


def nbytes(given: str | None, trace: Trace, name: str) -> int:
    """A size from the option, which was checked, else from the trace's meta, else 0."""
    if given is None:
        from greenroom.sim.study import stored_bytes

        return stored_bytes(trace, name)
    return 0 if given.strip() == "0" else Amount.parse(given, name).of(0)
