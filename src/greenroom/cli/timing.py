"""What `simulate --machine` needs to know of a machine: its costs, and its memory between links."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from greenroom.errors import UsageError

if TYPE_CHECKING:
    from greenroom.core.cost import Costs
    from greenroom.trace import Trace


def timing(args: argparse.Namespace, trace: Trace) -> dict[str, Any]:
    """The costs of this trace's model on the machine of the profile; nothing without one."""
    if args.machine is None:
        return {}
    from greenroom.cli.doctor import default_profile
    from greenroom.core.homes import homes
    from greenroom.core.machine import Machine

    machine = Machine.load(default_profile() if args.machine == "auto" else args.machine)
    expert = nbytes(args, trace, "expert_bytes")
    if expert is None:
        raise UsageError(
            "the trace does not say how large an expert is: give --expert-bytes, such as 12MiB"
        )
    dense = nbytes(args, trace, "dense_bytes") or 0
    costs = machine.costs(expert, dense, processor=args.processor, store=args.store)
    homes(trace.offsets.tolist(), args.devices or 1)  # or UsageError
    return {
        "costs": costs,
        "expert_bytes": expert,
        "host": host_slots(args, trace, costs),
        "co_compute": co_computed(args, costs),
        "devices": args.devices or 1,
    }


def co_computed(args: argparse.Namespace, costs: Costs) -> bool:
    """Whether misses may be computed where they wait; UsageError where nobody could."""
    if args.co_compute != "auto":
        return False
    if args.host_capacity is None:
        raise UsageError("--co-compute auto computes what host memory keeps: give --host-capacity")
    if costs.host is None:
        raise UsageError(
            "--co-compute auto needs two processors, one beside host memory and --processor behind"
            " it: this machine's profile has none there"
        )
    return True


def host_slots(args: argparse.Namespace, trace: Trace, costs: Costs) -> int:
    """Slots of the tier between two links; UsageError where there are not two."""
    from greenroom.sim.sweep import capacities

    if args.host_capacity is None:
        return 0
    if len(costs.links) != 2:
        raise UsageError(
            "--host-capacity is of memory between two links, disk to host to device: this way to"
            f" the processor has {len(costs.links)}"
        )
    slots = capacities(args.host_capacity, int(trace.offsets[-1]))
    if len(slots) != 1:
        raise UsageError(f"--host-capacity is one number, got {args.host_capacity}")
    return slots[0]


def nbytes(args: argparse.Namespace, trace: Trace, name: str) -> int | None:
    """A size from the option, else from the trace's meta, else None."""
    from greenroom.config import Amount

    option, given = f"--{name.replace('_', '-')}", getattr(args, name)
    if given is None:
        found = trace.meta.get(name)
        return int(found) if isinstance(found, int | float) and found > 0 else None
    if given.strip() == "0" and name == "dense_bytes":
        return 0
    amount = Amount.parse(given, option)
    if amount.nbytes is None:
        raise UsageError(f"{option} {given}: write bytes, as 12MiB")
    return amount.nbytes
