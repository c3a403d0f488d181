"""Add devices to a running model, or take them away.

All devices are named when the model is loaded: each has a link, and places for slots. Those without
experts take no memory for slots. A change takes place between two layers, while answers go on: the
experts whose home device changes leave the cache, and are read again when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from greenroom.config import parse_device
from greenroom.errors import UsageError
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.runtime.driver.driver import Driver


def change_devices(
    device: str,
    setup: ModelSetup,
    driver: Driver,
    slot_budget: SlotBudget | None,
    slots_each: Fraction,
) -> None:
    """Distribute a model's experts over the devices that `device` names, as `--device` does.

    slots_each: slots on each device, if no budget says how many

    Raises UsageError, BudgetError or DeviceError, before anything is changed.
    """
    places = device_places(device, setup)
    if slot_budget is not None:
        slot_budget.use_devices(places)
        return
    pieces = driver.pieces.on_devices(places)
    slots = min(max(round(slots_each * pieces.equal_devices), len(places)), pieces.experts)
    driver.resize(slots, devices=places)


def device_places(device: str, setup: ModelSetup) -> tuple[int, ...]:
    """Return the places, in a run's devices, of those that `device` names as `--device` does.

    Raises UsageError for devices that the run does not have, and without the first one, which has
    the weights that are not experts.
    """
    kind, numbers = parse_device(device)
    if len(setup.devices) < 2:
        raise UsageError(
            "this model was loaded on one device: name all devices that it may use in --device, and"
            " how many of them are for later in --spare-devices"
        )
    if kind != ("cuda" if setup.cuda else "fake") or not set(numbers) <= set(setup.devices):
        names = ", ".join(device_names(setup, range(len(setup.devices))))
        raise UsageError(f"devices {device[:64]}: this model was loaded on {names}")
    places = tuple(sorted(map(setup.devices.index, numbers)))
    if places[0]:
        first = device_names(setup, [0])[0]
        raise UsageError(f"devices {device[:64]}: {first} has the dense parts: name it too")
    return places


def device_names(setup: ModelSetup, places: Sequence[int]) -> list[str]:
    """Return the names of some of a run's devices, as `cuda:1`; none on a CPU."""
    if not (setup.cuda or setup.fake):
        return []
    kind = "cuda" if setup.cuda else "fake"
    return [f"{kind}:{setup.devices[place]}" for place in places]
