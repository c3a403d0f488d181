"""Measurements of this machine's CPU kernels for experts and dense layers.

The weights are larger than all caches of the processor, so they come from memory, as in a running
model. Times are medians of several calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from greenroom.core.layout import SlotLayout
from greenroom.core.machine import Table
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.dense.accelerate import accelerate
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.native.library import missing_reason
from greenroom.runtime.kernels.recipes import Recipe
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.table import make_kernel
from greenroom.runtime.slots.host import HostSlots

WEIGHT_BYTES = 96 << 20  # bytes of all weights, which are used in turn
EXPERTS_PER_STEP = 4  # experts of a step
SHAPES = ((1024, 512), (2048, 768), (2048, 1408))  # hidden, intermediate
DENSE = ((1024, 1024), (4096, 2048))  # rows, columns
TOKENS = (1, 16, 128)

Work = Callable[[], object]
Steps = tuple[int, Callable[[int], Work]]  # bytes of weights; makes a step of n tokens


class SwiGLUExperts(nn.Module):
    """Experts module for measurements: SwiGLU experts whose weights lie in slots."""

    def __init__(self, experts: int, transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.is_concatenated = experts, True, True
        self.has_bias = self.has_post_expert_norm = False
        self.is_transposed = transposed

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return silu(gate) * up


def random_layer(hidden: int, inner: int, experts: int, transposed: bool = False) -> LayerExperts:
    """Make an MoE layer of bf16 SwiGLU experts in host memory, for measurements.

    Expert e is in slot e. All experts have the same small random weights, since random numbers for
    each would take longer than any measurement. `inner` is the intermediate size.
    """
    up, down = (2 * inner, hidden), (hidden, inner)
    if transposed:
        up, down = up[::-1], down[::-1]
    layout = SlotLayout.pack([("gate_up_proj", up, "bfloat16"), ("down_proj", down, "bfloat16")])
    slots = HostSlots(experts, layout.nbytes)
    for spec in layout.tensors:
        drawn = (torch.randn(spec.shape) / 30).bfloat16()
        for slot in range(experts):
            slots.tensor(slot, spec).copy_(drawn)
    return LayerExperts(SwiGLUExperts(experts, transposed), layout, slots, Recipe())


def compute_step(
    chosen: Kernel, layer: LayerExperts, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute an MoE layer that `random_layer` made, with an expert kernel.

    x [tokens, hidden], index and weights [tokens, top_k] -> [tokens, hidden]
    """
    routing = Routing.of(index.numpy(), layer.num_experts)
    state = chosen.begin(layer, x, routing, weights)
    ids = routing.experts.tolist()
    chosen.compute_group(state, ids, ids)
    return chosen.combine(state)


def expert_times(seconds: float) -> Table:
    """Measure the seconds of one resident bf16 SwiGLU expert with the CPU's default kernel.

    The table is by expert size and tokens. Each measured call computes four experts.
    """
    return table_of(map(_expert_steps, SHAPES), seconds, EXPERTS_PER_STEP)


def dense_times(seconds: float) -> Table:
    """Measure the seconds of one bf16 linear layer without bias with Greenroom's CPU kernel.

    The table is by layer size and tokens.
    """
    return table_of(map(_dense_steps, DENSE), seconds)


def _expert_steps(shape: tuple[int, int]) -> Steps:
    """Return an expert's bytes, and a function that makes measured steps of four experts.

    All tokens of a step choose the same four experts; consecutive steps use different experts.
    """
    hidden, inner = shape
    nbytes, chosen = 6 * hidden * inner, make_kernel("eager" if missing_reason() else "native")
    layer = random_layer(
        hidden, inner, EXPERTS_PER_STEP * max(2, WEIGHT_BYTES // nbytes // EXPERTS_PER_STEP)
    )
    firsts = range(0, layer.num_experts, EXPERTS_PER_STEP)

    def steps(tokens: int) -> Work:
        x = torch.randn(tokens, hidden).bfloat16()
        weights = torch.full((tokens, EXPERTS_PER_STEP), 1 / EXPERTS_PER_STEP).bfloat16()
        per_step = [
            torch.arange(n, n + EXPERTS_PER_STEP).expand(tokens, -1).contiguous() for n in firsts
        ]
        turns = itertools.cycle(per_step)
        return lambda: compute_step(chosen, layer, x, next(turns), weights)

    return nbytes, steps


def _dense_steps(shape: tuple[int, int]) -> Steps:
    height, width = shape
    nbytes = 2 * height * width
    model = nn.ModuleList(_linear(width, height) for _ in range(max(2, WEIGHT_BYTES // nbytes)))
    if not missing_reason():
        accelerate(model)

    def steps(tokens: int) -> Work:
        x, turns = torch.randn(tokens, width).bfloat16(), itertools.cycle(model)
        return lambda: next(turns)(x)

    return nbytes, steps


def _linear(width: int, height: int) -> nn.Linear:
    """Make a linear layer of ones, since random weights take longer to draw than to multiply."""
    layer = nn.utils.skip_init(nn.Linear, width, height, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    return layer


def typical(work: Work, seconds: float) -> float:
    """Return the median seconds of a function's calls, repeated for about `seconds`.

    The first call is not timed; at least one call is.
    """
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def table_of(measured: Iterable[Steps], seconds: float, per_step: int = 1) -> Table:
    """Measure the seconds of a computation, as a table by bytes of weights and tokens.

    measured: (bytes of weights, function that makes a step for a number of tokens) for each size
    seconds: about how long each entry is measured
    per_step: number of equal computations in a step, by which the times are divided

    Noise is smoothed: a time for more tokens is never lower than that for fewer.
    """
    sizes, rows = [], []
    for nbytes, steps in measured:
        times = [typical(steps(tokens), seconds) / per_step for tokens in TOKENS]
        sizes.append(nbytes)
        rows.append(tuple(itertools.accumulate(times, max)))
    return Table(tuple(sizes), TOKENS, tuple(rows))
