"""Measurements of a GPU: its link to host memory, its memory and matrix products.

All measurements use an `Engine`, so the same code can measure a CPU in place of a GPU. Copies from
host memory are measured both from pinned memory (registered with the device), which a run uses if
the system allows it, and from pageable memory, which shows the gain of pinning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from greenroom.core.cost import CHUNK_BYTES, Link
from greenroom.core.machine import Machine, Processor, Route, Table
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.measure import kernels
from greenroom.runtime.measure.kernels import Steps, Work, table_of, typical

SMALL = 64 << 10  # bytes of a copy that takes little more than the latency
MEMORY = 256 << 20  # bytes that are copied within the device, more than any cache holds
LANES = 2  # of the link to a device, as in a run
STEP_LAUNCHES = 4  # experts or layers launched without a wait, so that their launches overlap


def with_device(machine: Machine, engine: Engine, seconds: float) -> Machine:
    """Measure a GPU, and return a machine profile to which the GPU is added.

    Each figure is measured for about `seconds`. Raises DeviceError if the GPU fails.
    """
    link, measured = link_of(engine, seconds)
    measured |= {
        "name": engine.name,
        "memory_bytes": engine.memory()[1],
        "memory": memory_rate(engine, seconds),
    }
    gpu = Processor("gpu", "device", expert_times(engine, seconds), dense_times(engine, seconds))
    return replace(
        machine,
        routes=(*machine.routes, Route("host", "device", link)),
        processors=(*machine.processors, gpu),
        measured={**machine.measured, "device": measured},
    )


def link_of(engine: Engine, seconds: float) -> tuple[Link, dict[str, Any]]:
    """Measure a GPU's link from host memory: a cost model, and rates in bytes a second.

    The rates are `pinned` and `pageable`. If the device refuses to pin memory, `pinned` is None,
    `unpinned` is the reason, and the cost model is that of pageable copies.
    """
    source, target = torch.zeros(CHUNK_BYTES, dtype=torch.uint8), engine.empty(CHUNK_BYTES)
    pageable = CHUNK_BYTES / copy_time(engine, source, target, CHUNK_BYTES, seconds)
    with registered(engine, source) as refusal:
        pinned = CHUNK_BYTES / copy_time(engine, source, target, CHUNK_BYTES, seconds)
        small = copy_time(engine, source, target, SMALL, seconds)
    rate = pageable if refusal else pinned
    rates: dict[str, Any] = {"pinned": None if refusal else pinned, "pageable": pageable}
    if refusal:
        rates["unpinned"] = refusal
    return Link(rate, max(0.0, small - SMALL / rate), LANES), rates


@contextmanager
def registered(engine: Engine, memory: Tensor) -> Iterator[str | None]:
    """Pin host memory within this context; yield None, or why the device refuses."""
    refusal = engine.register(memory.data_ptr(), memory.nbytes)
    try:
        yield refusal
    finally:
        if refusal is None:
            engine.unregister(memory.data_ptr())


def copy_time(engine: Engine, source: Tensor, target: Tensor, nbytes: int, seconds: float) -> float:
    """Measure the seconds of a copy of `nbytes` bytes from the host to a GPU."""

    def copy() -> None:
        with engine.copying(None):
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    return typical(copy, seconds)


def memory_rate(engine: Engine, seconds: float) -> float:
    """Measure a GPU's memory bandwidth, in bytes read and written a second."""
    nbytes = min(MEMORY, engine.memory()[0] // 8)
    source, target = engine.empty(nbytes), engine.empty(nbytes)
    return 2 * nbytes / typical(with_wait(engine, lambda: target.copy_(source)), seconds)


def with_wait(engine: Engine, work: Work) -> Work:
    """Return a function that launches work on a GPU and waits for its end."""

    def work_and_wait() -> None:
        work()
        engine.wait(engine.mark())

    return work_and_wait


def expert_times(engine: Engine, seconds: float) -> Table:
    """Measure the seconds of one bf16 SwiGLU expert on a GPU, by size and tokens.

    The expert is computed by torch. Consecutive computations use different weights, so these come
    from memory and not from a cache.
    """

    def expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, h = linear(x, up).chunk(2, dim=-1)
        return linear(silu(gate) * h, down)

    shapes = [((2 * inner, hidden), (hidden, inner)) for hidden, inner in kernels.SHAPES]
    return table_of((_steps(engine, shape, expert) for shape in shapes), seconds, STEP_LAUNCHES)


def dense_times(engine: Engine, seconds: float) -> Table:
    """Measure the seconds of one bf16 linear layer on a GPU, by size and tokens.

    The layer has no bias.
    """
    shapes = [(shape,) for shape in kernels.DENSE]
    return table_of((_steps(engine, shape, linear) for shape in shapes), seconds, STEP_LAUNCHES)


def _steps(
    engine: Engine, shapes: Sequence[tuple[int, int]], compute: Callable[..., Tensor]
) -> Steps:
    """Return the bytes of one computation's weights, and a function that makes measured steps.

    A step is four computations on a GPU with weights of the given shapes. Steps use several sets of
    weights in turn.
    """
    nbytes = sum(2 * rows * columns for rows, columns in shapes)
    weights = [
        [[_ones(engine, *shape) for shape in shapes] for _ in range(STEP_LAUNCHES)]
        for _ in range(max(1, kernels.WEIGHT_BYTES // nbytes // STEP_LAUNCHES))
    ]

    def steps(tokens: int) -> Work:
        x, turns = _ones(engine, tokens, shapes[0][1]), itertools.cycle(weights)
        return with_wait(engine, lambda: [compute(x, *each) for each in next(turns)])

    return nbytes, steps


def _ones(engine: Engine, rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bfloat16, device=engine.device)
