"""Measure a machine's costs besides matrix products, with a small random model.

A layer takes time beyond its matrix products (attention, norms, router, Python between kernels).
Fetching an expert takes time from the cores that compute, and these are slower after a wait. The
costs are measured with the code that runs real models, and are saved in the machine's profile.
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
WAIT = 2e-3  # seconds in which an expert of the smallest model arrives, to measure waits
SHAPE = Shape()
SMALLEST = Shape(
    hidden=128, inner=64, layers=8, experts=32, top_k=4
)  # it computes little, and waits
DEVICES = {"host": "cpu", "device": "cuda"}  # the --device that computes from each memory


def with_dry_run(
    machine: Machine,
    folder: Path,
    shape: Shape | None = None,
    devices: Mapping[str, str] | None = None,
) -> Machine:
    """Measure overheads with small random models, and add them to a machine's description.

    folder:  where the models are written, and removed afterwards
    shape:   the larger model's shape, by default `Shape()`
    devices: the value of `--device` (cpu or cuda), under "host" for processors that compute from
             host memory, and under "device" for those that compute from GPU memory
    """
    shape, devices = shape or SHAPE, devices or DEVICES
    with small_model(folder, shape) as model, small_model(folder, SMALLEST) as smallest:
        processors = [
            _measure_processor(
                machine, each, devices[each.memory], str(model), str(smallest), shape
            )
            for each in machine.processors
        ]
    return replace(machine, processors=tuple(processors))


def _measure_processor(
    machine: Machine, processor: Processor, device: str, model: str, smallest: str, shape: Shape
) -> Processor:
    resident, part, ahead = measure(model, shape, device)
    slow = Case(read_limit=int(SMALLEST.expert_bytes / WAIT))
    wake = wake_cost(*measure(smallest, SMALLEST, device, (PART, slow)))
    matrices = shape.layers * (
        shape.top_k * processor.expert.at(shape.expert_bytes).seconds(1)
        + processor.dense.at(_dense_bytes(shape)).seconds(1)
    )
    base, fetched = compute_seconds(resident), part.misses / len(part.gaps)
    busy = compute_seconds(part) - wake * wait_seconds(part)
    handling = max(0.0, (busy - base) / fetched) if fetched >= 1 else 0.0
    extra = ahead.bytes_read / len(ahead.gaps) / shape.expert_bytes - fetched
    predicted = (
        compute_seconds(ahead) - wake * wait_seconds(ahead) - busy - handling * max(0.0, extra)
    )
    copied = min(handling, shape.expert_bytes / _copy_rate(machine))
    # The measured token is the upper limit: matrices alone cannot take longer.
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


def compute_seconds(session: Measurement) -> float:
    """Return the mean seconds that a token takes without waits for experts."""
    return session.tpot_s - session.stall_s / len(session.gaps)


def wait_seconds(session: Measurement) -> float:
    """Return the mean seconds that a token waits for experts.

    On average, at most 4 ms are counted for each cache miss: a longer wait does not make the next
    computation any slower.
    """
    return min(session.stall_s, COOLED * session.misses) / len(session.gaps)


def wake_cost(short: Measurement, long: Measurement) -> float:
    """Return by how many seconds each second of waiting lengthens computation.

    The figure comes from two runs that wait for about the same number of experts: `long` waits
    longer than `short`. It is stored as a processor's `wake` cost.
    """
    more = wait_seconds(long) - wait_seconds(short)
    return max(0.0, (compute_seconds(long) - compute_seconds(short)) / more) if more > 0 else 0.0


def _copy_rate(machine: Machine) -> float:
    """Return the bytes per second that one thread copies, half of its memory traffic."""
    return float(machine.measured["memory"]["1"]) / 2


class Case(NamedTuple):
    """Setting in which the small random model of a dry run is measured.

    all_resident: whether every expert has a slot; otherwise half of them have one
    prefetch:     the predictor of the experts to prefetch, or "off"
    read_limit:   bytes per second that the disk delivers; None for its own speed
    """

    all_resident: bool = False
    prefetch: str = "off"
    read_limit: int | None = None


ALL_RESIDENT, PART, AHEAD = Case(all_resident=True), Case(), Case(prefetch="next-gate")


def measure(
    model: str, shape: Shape, device: str, cases: Sequence[Case] = (ALL_RESIDENT, PART, AHEAD)
) -> list[Measurement]:
    """Measure a small random model's answer to a prompt, in each setting (`Case`)."""
    harness = Harness(model, LoadConfig(cache="100%", prefetch="off", device=device, context=256))
    prompts = [Prompt(" ".join(f"w{i}" for i in range(4, 24)), "rehearsal")]
    slots, measurements = max(shape.top_k, int(SHARE * shape.layers * shape.experts)), []
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
            measurements.append(harness.play(prompts, TOKENS, SETTLE))
        return measurements
    finally:
        harness.close()


def _dense_bytes(shape: Shape) -> int:
    """Return the bytes of a layer's attention weights, with its share of the output head."""
    attention = 2 * shape.hidden * (2 * shape.heads * 64 + 2 * 4 * 64)
    return attention + 2 * shape.vocabulary * shape.hidden // shape.layers
