"""A dry run: a small random model is run here, to learn what its matrices alone do not tell.

A layer takes more than its weights (attention, norms, router, Python between kernels), an expert
that is fetched takes time of the cores that compute, and these are slower after a wait. All of it
is measured with the code that runs any other model, and goes into the machine's profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from greenroom.config import LoadConfig
from greenroom.core.cost import COOLED
from greenroom.core.machine import Machine, Processor
from greenroom.hf.measure.harness import Harness, Measurement
from greenroom.hf.measure.random_model import Shape, small_model
from greenroom.trace.prompts import Prompt

SHARE = 0.5  # of the experts, in memory in the second part
TOKENS, SETTLE = 40, 8
WAIT = 2e-3  # seconds that an expert of the smallest model comes in, where waits are measured
SHAPE = Shape()
SMALLEST = Shape(hidden=128, inner=64, layers=8, experts=32, top_k=4)  # it does little but wait
DEVICES = {"host": "cpu", "device": "cuda"}  # who computes from a memory, as a run calls it


def with_dry_run(
    machine: Machine,
    folder: Path,
    shape: Shape | None = None,
    devices: Mapping[str, str] | None = None,
) -> Machine:
    """The profile with what runs beside `folder`'s disk take beyond it, on every processor."""
    shape, devices = shape or SHAPE, devices or DEVICES
    with small_model(folder, shape) as model, small_model(folder, SMALLEST) as smallest:
        judged = [
            _judged(machine, each, devices[each.memory], str(model), str(smallest), shape)
            for each in machine.processors
        ]
    return replace(machine, processors=tuple(judged))


def _judged(
    machine: Machine, processor: Processor, device: str, model: str, smallest: str, shape: Shape
) -> Processor:
    all_resident, part, ahead = measure(model, shape, device)
    slow = Case(read_limit=int(SMALLEST.expert_bytes / WAIT))
    wake = waiting(*measure(smallest, SMALLEST, device, (PART, slow)))
    matrices = shape.layers * (
        shape.top_k * processor.expert.at(shape.expert_bytes).seconds(1)
        + processor.dense.at(_dense_bytes(shape)).seconds(1)
    )
    base, fetched = computed(all_resident), part.misses / len(part.gaps)
    busy = computed(part) - wake * waited(part)
    handling = max(0.0, (busy - base) / fetched) if fetched >= 1 else 0.0
    more = ahead.bytes_read / len(ahead.gaps) / shape.expert_bytes - fetched
    predicted = computed(ahead) - wake * waited(ahead) - busy - handling * max(0.0, more)
    copied = min(handling, shape.expert_bytes / _copies(machine))
    # What runs is the judge: matrices alone cannot take longer than all of a token.
    factor = min(1.0, base / matrices)
    return replace(
        processor,
        expert=processor.expert.scaled(factor),
        dense=processor.dense.scaled(factor),
        layer=max(0.0, base - matrices) / shape.layers,
        fetch=handling - copied,
        copy=copied / shape.expert_bytes,
        ahead=max(0.0, predicted / shape.layers),
        wake=wake,
    )


def computed(session: Measurement) -> float:
    """Seconds a token that are no stall."""
    return session.tpot_s - session.stall_s / len(session.gaps)


def waited(session: Measurement) -> float:
    """Seconds a token of its waits, of each no more than counts (see `Costs.wake`)."""
    return min(session.stall_s, COOLED * session.misses) / len(session.gaps)


def waiting(short: Measurement, long: Measurement) -> float:
    """`Costs.wake`, from two runs that waited for about as many experts."""
    more = waited(long) - waited(short)
    return max(0.0, (computed(long) - computed(short)) / more) if more > 0 else 0.0


def _copies(machine: Machine) -> float:
    """Bytes a second that one thread copies: it reads and writes each of them."""
    return float(machine.measured["memory"]["1"]) / 2


class Case(NamedTuple):
    """A setting of the small model: with a slot for every expert, all of them there, or for SHARE
    of them; a predictor without its guard; bytes that the disk may deliver a second."""

    all_resident: bool = False
    prefetch: str = "off"
    read_limit: int | None = None


ALL_RESIDENT, PART, AHEAD = Case(all_resident=True), Case(), Case(prefetch="next-gate")


def measure(
    model: str, shape: Shape, device: str, cases: Sequence[Case] = (ALL_RESIDENT, PART, AHEAD)
) -> list[Measurement]:
    """Answer the same prompt in each case."""
    harness = Harness(model, LoadConfig(cache="100%", prefetch="off", device=device, context=256))
    prompts = [Prompt(" ".join(f"w{i}" for i in range(4, 24)), "rehearsal")]
    slots, found = max(shape.top_k, int(SHARE * shape.layers * shape.experts)), []
    try:
        for case in cases:
            if case.all_resident:
                harness.fill()
            else:
                harness.setup = replace(harness.setup, read_limit=case.read_limit)
                config = LoadConfig(
                    policy="lru", prefetch=case.prefetch, no_guard=case.prefetch != "off"
                )
                harness.attach(config, slots)
            found.append(harness.play(prompts, TOKENS, SETTLE))
        return found
    finally:
        harness.close()


def _dense_bytes(shape: Shape) -> int:
    """Of a layer: attention, and its share of the head."""
    attention = 2 * shape.hidden * (2 * shape.heads * 64 + 2 * 4 * 64)
    return attention + 2 * shape.vocabulary * shape.hidden // shape.layers
