"""What the kernels of this machine take: one expert, and one dense layer, by size and tokens.

Weights are random and larger than the caches together, so that they come from memory as they do
when a model runs. Medians of several calls.
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
from greenroom.runtime.kernels.recipes import Recipe
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.table import make_kernel
from greenroom.runtime.slots.host import HostSlots

STREAMED = 96 << 20  # bytes of weights that take turns
TOGETHER = 4  # experts of a step
SHAPES = ((1024, 512), (2048, 768), (2048, 1408))  # hidden, intermediate
DENSE = ((1024, 1024), (4096, 2048))  # rows, columns
TOKENS = (1, 16, 128)

Work = Callable[[], object]
Steps = tuple[int, Callable[[int], Work]]  # bytes of weights, what a step of n tokens does


class Experts(nn.Module):
    """A SwiGLU experts module whose weights lie in slots."""

    def __init__(self, experts: int, transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.is_concatenated = experts, True, True
        self.has_bias = self.has_post_expert_norm = False
        self.is_transposed = transposed

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return silu(gate) * up


def random_layer(hidden: int, inner: int, experts: int, transposed: bool = False) -> LayerExperts:
    """A layer of bf16 experts, all resident; expert e lies in slot e.

    All have the same small random weights: drawing them takes longer than any measurement.
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
    return LayerExperts(Experts(experts, transposed), layout, slots, Recipe())


def step(chosen: Kernel, layer: LayerExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A whole step of `random_layer` in one group: x [T, H], index and weights [T, K] -> [T, H]."""
    routing = Routing.of(index.numpy(), layer.num_experts)
    state = chosen.begin(layer, x, routing, weights)
    ids = routing.experts.tolist()
    chosen.compute_group(state, ids, ids)
    return chosen.combine(state)


def expert_times(seconds: float) -> Table:
    """Seconds of one bf16 SwiGLU expert in a step of four, all resident, by the compiled kernel."""
    return table_of(map(_expert_steps, SHAPES), seconds, TOGETHER)


def dense_times(seconds: float) -> Table:
    """Seconds of one bf16 linear layer without bias, as Greenroom computes it."""
    return table_of(map(_dense_steps, DENSE), seconds)


def _expert_steps(shape: tuple[int, int]) -> Steps:
    """Steps in which every token chooses the same four experts, others in every step."""
    hidden, inner = shape
    nbytes, chosen = 6 * hidden * inner, make_kernel("numba")
    layer = random_layer(hidden, inner, TOGETHER * max(2, STREAMED // nbytes // TOGETHER))
    firsts = range(0, layer.num_experts, TOGETHER)

    def steps(tokens: int) -> Work:
        x = torch.randn(tokens, hidden).bfloat16()
        weights = torch.full((tokens, TOGETHER), 1 / TOGETHER).bfloat16()
        together = [torch.arange(n, n + TOGETHER).expand(tokens, -1).contiguous() for n in firsts]
        turns = itertools.cycle(together)
        return lambda: step(chosen, layer, x, next(turns), weights)

    return nbytes, steps


def _dense_steps(shape: tuple[int, int]) -> Steps:
    height, width = shape
    nbytes = 2 * height * width
    model = nn.ModuleList(_linear(width, height) for _ in range(max(2, STREAMED // nbytes)))
    accelerate(model)

    def steps(tokens: int) -> Work:
        x, turns = torch.randn(tokens, width).bfloat16(), itertools.cycle(model)
        return lambda: next(turns)(x)

    return nbytes, steps


def _linear(width: int, height: int) -> nn.Linear:
    """Ones as weights: to draw them takes longer than to multiply with them."""
    made = nn.utils.skip_init(nn.Linear, width, height, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(made.weight)
    return made


def typical(work: Work, seconds: float) -> float:
    """The median time of a call, after one that warms up; at least one call is timed."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def table_of(measured: Iterable[Steps], seconds: float, together: int = 1) -> Table:
    """Seconds of one of `together` that a step computes, by bytes and tokens; each is measured for
    about `seconds`. More tokens are never faster: what noise says otherwise is levelled."""
    sizes, rows = [], []
    for nbytes, steps in measured:
        times = [typical(steps(tokens), seconds) / together for tokens in TOKENS]
        sizes.append(nbytes)
        rows.append(tuple(itertools.accumulate(times, max)))
    return Table(tuple(sizes), TOKENS, tuple(rows))
