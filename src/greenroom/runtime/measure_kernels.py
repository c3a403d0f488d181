"""What the kernels of this machine take: one expert, and one dense layer, by size and tokens.

Weights are random and larger than the caches together, so that they come from memory as they do
when a model runs. Medians of several calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.functional import silu

from greenroom.core.layout import SlotLayout
from greenroom.core.machine import Table
from greenroom.runtime.kernels import LayerExperts, Recipe, Routing, accelerate, kernel
from greenroom.runtime.slots import HostSlots

STREAMED = 96 << 20  # bytes of weights that take turns
TOGETHER = 4  # experts of a step
SHAPES = ((1024, 512), (2048, 768), (2048, 1408))  # hidden, intermediate
DENSE = ((1024, 1024), (4096, 2048))  # rows, columns
TOKENS = (1, 16, 128)


class Experts(nn.Module):
    """A SwiGLU experts module whose weights lie in slots."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.is_concatenated = experts, True, True
        self.has_bias = self.has_post_expert_norm = self.is_transposed = False

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return silu(gate) * up


@torch.no_grad()
def expert_times(seconds: float, shapes: Sequence[tuple[int, int]] = SHAPES) -> Table:
    """Seconds of one bf16 SwiGLU expert in a step of four, all resident.

    Each of size and tokens is measured for about `seconds`.
    """
    sizes, rows = [], []
    for hidden, inner in shapes:
        layout = SlotLayout.pack(
            [("gate_up_proj", (2 * inner, hidden), "bfloat16"),
             ("down_proj", (hidden, inner), "bfloat16")]
        )  # fmt: skip
        count = max(2 * TOGETHER, STREAMED // layout.nbytes // TOGETHER * TOGETHER)
        slots = HostSlots(count, layout.nbytes)
        _fill(slots, count)
        layer = LayerExperts(Experts(count), layout, slots, Recipe())
        sizes.append(layout.nbytes)
        rows.append([_step_time(layer, tokens, seconds) / TOGETHER for tokens in TOKENS])
        slots.close()
    return _table(sizes, rows)


def _fill(slots: HostSlots, count: int) -> None:
    """Small random bf16 weights, made once and copied: drawing them all would take longest."""
    drawn = (torch.randn(slots.stride // 2) / 30).bfloat16().view(torch.uint8).numpy()
    for slot in range(count):
        slots.bytes(slot)[: drawn.size] = drawn


def _step_time(layer: LayerExperts, tokens: int, seconds: float) -> float:
    chosen = kernel("numba")
    x = torch.randn(tokens, layer.hidden).bfloat16()
    weights = torch.full((tokens, TOGETHER), 1 / TOGETHER).bfloat16()
    turns: Iterator[int] = itertools.cycle(range(0, layer.num_experts, TOGETHER))

    def step() -> None:
        first = next(turns)
        index = torch.arange(first, first + TOGETHER).expand(tokens, -1).contiguous()
        routing = Routing.of(index.numpy(), layer.num_experts)
        state = chosen.begin(layer, x, routing, weights)
        ids = routing.experts.tolist()
        chosen.wave(state, ids, ids)
        chosen.combine(state)

    return typical(step, seconds)


@torch.no_grad()
def dense_times(seconds: float, shapes: Sequence[tuple[int, int]] = DENSE) -> Table:
    """Seconds of one bf16 linear layer without bias, as Greenroom computes it."""
    sizes, rows = [], []
    for height, width in shapes:
        nbytes = 2 * height * width
        model = nn.ModuleList(
            nn.Linear(width, height, bias=False, dtype=torch.bfloat16)
            for _ in range(max(2, STREAMED // nbytes))
        )
        done = accelerate(model)
        try:
            times = []
            for tokens in TOKENS:
                x, turns = torch.randn(tokens, width).bfloat16(), itertools.cycle(model)
                times.append(typical(lambda: next(turns)(x), seconds))  # noqa: B023
        finally:
            done.detach()
        sizes.append(nbytes)
        rows.append(times)
    return _table(sizes, rows)


def typical(work: Callable[[], object], seconds: float, least: int = 3) -> float:
    """The median time of a call, after one that warms up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _table(sizes: list[int], rows: list[list[float]]) -> Table:
    """More tokens are never faster: what noise says otherwise is levelled."""
    level = [tuple(itertools.accumulate(row, max)) for row in rows]
    return Table(tuple(sizes), TOKENS, tuple(level))
