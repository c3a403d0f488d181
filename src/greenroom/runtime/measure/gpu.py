"""What a device can do, for a machine's profile: its link to host memory, its memory, its products.

All of it goes through an `Engine`, so that the CPU in a GPU's place is measured by the same code.
Host memory is copied from as the tier does it: registered with the device (pinned) where it lets
us, and beside that as it is (pageable), which tells what pinning is worth.
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

SMALL = 64 << 10  # bytes of a copy that little but its latency takes
MEMORY = 256 << 20  # bytes that are copied within the device: more than any cache has
LANES = 2  # of a link to a device, as a run has them
TOGETHER = 4  # experts, or layers, that are ordered at once: their launches overlap


def with_device(machine: Machine, engine: Engine, seconds: float) -> Machine:
    """The profile with a device behind host memory; each figure is measured for about `seconds`.
    DeviceError where the device fails."""
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
    """(host to device, bytes a second of `pinned` and `pageable` copies); `pinned` is None and
    `unpinned` says why where the device does not register memory, and the link is then the other's.
    """
    source, target = torch.zeros(CHUNK_BYTES, dtype=torch.uint8), engine.empty(CHUNK_BYTES)
    pageable = CHUNK_BYTES / copy_time(engine, source, target, CHUNK_BYTES, seconds)
    with registered(engine, source) as refused:
        pinned = CHUNK_BYTES / copy_time(engine, source, target, CHUNK_BYTES, seconds)
        small = copy_time(engine, source, target, SMALL, seconds)
    rate = pageable if refused else pinned
    found: dict[str, Any] = {"pinned": None if refused else pinned, "pageable": pageable}
    if refused:
        found["unpinned"] = refused
    return Link(rate, max(0.0, small - SMALL / rate), LANES), found


@contextmanager
def registered(engine: Engine, memory: Tensor) -> Iterator[str | None]:
    """Within, the device reads this memory itself; why not, where it refuses."""
    refused = engine.register(memory.data_ptr(), memory.nbytes)
    try:
        yield refused
    finally:
        if refused is None:
            engine.unregister(memory.data_ptr())


def copy_time(engine: Engine, source: Tensor, target: Tensor, nbytes: int, seconds: float) -> float:
    """Seconds of one copy to the device, ordered and awaited as the copier does."""

    def copy() -> None:
        with engine.copying(None):
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    return typical(copy, seconds)


def memory_rate(engine: Engine, seconds: float) -> float:
    """Bytes a second that the device reads and writes in its own memory, together."""
    nbytes = min(MEMORY, engine.memory()[0] // 8)
    source, target = engine.empty(nbytes), engine.empty(nbytes)
    return 2 * nbytes / typical(awaited(engine, lambda: target.copy_(source)), seconds)


def awaited(engine: Engine, work: Work) -> Work:
    """The work, and until the device has done it."""

    def done() -> None:
        work()
        engine.wait(engine.mark())

    return done


def expert_times(engine: Engine, seconds: float) -> Table:
    """Seconds of one bf16 SwiGLU expert by torch's products, others in every step."""

    def expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, h = linear(x, up).chunk(2, dim=-1)
        return linear(silu(gate) * h, down)

    shapes = [((2 * inner, hidden), (hidden, inner)) for hidden, inner in kernels.SHAPES]
    return table_of((_steps(engine, shape, expert) for shape in shapes), seconds, TOGETHER)


def dense_times(engine: Engine, seconds: float) -> Table:
    """Seconds of one bf16 linear layer without bias."""
    shapes = [(shape,) for shape in kernels.DENSE]
    return table_of((_steps(engine, shape, linear) for shape in shapes), seconds, TOGETHER)


def _steps(
    engine: Engine, shapes: Sequence[tuple[int, int]], compute: Callable[..., Tensor]
) -> Steps:
    """Steps of TOGETHER that are ordered at once, with weights of these shapes that take turns."""
    nbytes = sum(2 * rows * columns for rows, columns in shapes)
    weights = [
        [[_ones(engine, *shape) for shape in shapes] for _ in range(TOGETHER)]
        for _ in range(max(1, kernels.STREAMED // nbytes // TOGETHER))
    ]

    def steps(tokens: int) -> Work:
        x, turns = _ones(engine, tokens, shapes[0][1]), itertools.cycle(weights)
        return awaited(engine, lambda: [compute(x, *each) for each in next(turns)])

    return nbytes, steps


def _ones(engine: Engine, rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bfloat16, device=engine.device)
