"""Steps of the default expert kernel on a GPU: two launches a group, and one for the sum.

Weights are read from slots in device memory. Every (token, expert) output is stored until the sum
over a token's experts, which is taken by ascending expert id; so groups, slots and the order of
arrival do not change a bit. The eager kernel on the same device computes layers that the Triton
programs cannot: float32 models, uncommon arithmetic, other encodings (`fallback_reason`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from greenroom.runtime.kernels import base, eager
from greenroom.runtime.kernels.activation import RAW, Activation
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.native.library import missing_reason
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import chunks, one_token, programs
from greenroom.runtime.kernels.triton.expand import ENCODINGS
from greenroom.runtime.kernels.triton.plan import TritonLayerPlan, TritonMatrix, group_of, plan_of

IntArray = NDArray[np.int64]

# Entries, outputs and inputs of a program, and its warps: for few entries per expert, for many, and
# for more on devices that compute large tiles.
FEW, MANY, MORE = (16, 32, 128, 4), (64, 64, 64, 4), (128, 128, 64, 8)
STAGES = 3
SUMMED = 1024  # outputs of a program of `combine`


def fallback_reason(layer: LayerExperts) -> str | None:
    """Return why Triton cannot compute an MoE layer's experts, or None if it can.

    The reason is a noun, such as "experts in iq2_xxs".
    """
    if layer.dtype is torch.float32:
        return "float32 experts, for which eager is the nearest to transformers"
    if layer.recipe.compute is not None:
        return f"experts that compute in {str(layer.recipe.compute)[6:]}"
    weights = layer.up_weight, layer.down_weight
    if any(len(weight.halves) > 1 for weight in weights):
        return "experts whose gate and up have different types"
    encodings = {
        weight.encoding
        for weight in weights
        if weight.encoding not in ENCODINGS and not group_of(weight)
    }
    return f"experts in {', '.join(sorted(encodings))}" if encodings else None


class Launch(NamedTuple):
    """A launch of a Triton program, without its first arguments, which differ between calls."""

    program: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]  # the last ones
    constants: dict[str, Any]

    def start(self, *first: Any) -> None:
        """Launch the program with its first arguments, without waiting for the GPU."""
        self.program[self.grid](*first, *self.arguments, **self.constants)


class TritonStep(base.KernelStep):
    """One MoE layer's computation for some tokens by the Triton kernel.

    `mid` [S, 2 I] (up projections, only for a module's own activation), `act` [S, I] (activations)
    and `out` [S, H] (expert outputs) have the layer's type. S is the number of (token, rank)
    entries that experts compute. Outputs of segments are summed in `sums` [S, H], in float32.
    """

    __slots__ = ("act", "kind", "mid", "one", "order", "out", "plan", "sizes", "sums", "tokens")
    supports_segments = True

    def __init__(
        self,
        layer: LayerExperts,
        plan: TritonLayerPlan,
        x: Tensor,
        routing: Routing,
        weights: Tensor,
    ) -> None:
        super().__init__(layer, x.to(layer.dtype).contiguous(), routing, weights.contiguous())
        self.plan, self.kind = plan, x.dtype
        entries, most = len(routing.rows), int(np.diff(routing.starts).max(initial=0))
        self.sizes, self.one = FEW if most <= FEW[0] else MANY, most == 1
        if most > MANY[0] and plan.large_tiles:
            self.sizes = MORE

        def empty(columns: int) -> Tensor:
            return torch.empty(entries, columns, dtype=layer.dtype, device=plan.device)

        self.mid = empty(layer.width) if plan.activation.code == RAW else None
        self.act, self.out = empty(layer.inner), empty(layer.hidden)
        self.sums: Tensor | None = None  # set with the first segment
        self.tokens: Tensor | None = None  # [S], set with the first group
        self.order: Tensor | None = None  # [T, K, 2]

    def make_tiles(
        self, experts: Sequence[int], slots: Sequence[int], layer: LayerExperts
    ) -> IntArray:
        """Split an expert group's entries into tiles that Triton programs compute.

        `layer` describes the slots. Return [tiles, 4]: offset of the expert's slot, expert, first
        entry, number of entries.
        """
        plan = plan_of(layer)
        offsets = [plan.offset(layer, slot) for slot in slots]
        return self.routing.tiles(experts, offsets, self.sizes[0])

    def send(self, experts: Sequence[int], slots: Sequence[int], layer: LayerExperts) -> Tensor:
        """Copy the tiles of an expert group to the GPU.

        The first copy includes the step's routing. Return the tiles as one vector, with
        4 numbers for each tile.
        """
        tiles, device = self.make_tiles(experts, slots, layer).ravel(), self.plan.device
        if self.tokens is not None:
            return upload(tiles, device)
        # Each part is aligned to 16 bytes: Triton would compile again for another alignment.
        routing, (tokens, top_k) = self.routing, self.routing.shape
        entries = len(routing.tokens)
        sizes = [-(-entries // 2) * 2, 2 * tokens * top_k, len(tiles)]
        memory = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        first, order, last = (part.numpy() for part in memory.split(sizes))
        first[:entries], first[entries:], last[:] = routing.tokens, 0, tiles
        routing.write_sum_order(order.reshape(tokens, top_k, 2))
        sent = memory.to(device, non_blocking=True).split(sizes)
        self.tokens, self.order, uploaded = sent
        return uploaded

    def compute_group(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Launch the computation of a group of experts without waiting for the GPU."""
        self.compute_from(experts, slots, self.layer)

    def compute_from(
        self,
        experts: Sequence[int],
        slots: Sequence[int],
        layer: LayerExperts,
        accumulate: bool = False,
    ) -> None:
        with on_device(self.plan.device):
            tiles = self.send(experts, slots, layer)
            if len(tiles):
                segment = 0 if layer.inner == self.layer.inner else 2 if accumulate else 1
                self.project(tiles, layer, segment)

    def project(self, tiles: Tensor, layer: LayerExperts, segment: int = 0) -> None:
        """Launch the up and down projections of an expert group's tiles on the GPU.

        layer:   describes the slots
        segment: 0 for all channels of an expert, 1 for the first segment, 2 for a later one
        """
        plan, entries = plan_of(layer), len(self.out)
        act = self.act.view(-1)[: entries * layer.inner].view(entries, layer.inner)
        mid, out = None, self.out
        if self.mid is not None:
            mid = self.mid.view(-1)[: entries * layer.width].view(entries, layer.width)
        if segment:
            if self.sums is None:
                self.sums = torch.empty_like(out, dtype=torch.float32)
            out = self.sums
        assert self.tokens is not None
        self.projection(
            *(tiles, plan.up, layer.up_bias, act if mid is None else mid),
            *(layer.hidden, layer.inner, plan.activation, self.tokens),
        ).start(self.x)
        if mid is not None:  # for all entries: rows of other groups are written again later
            act.copy_(layer.activate(mid))
        bias = layer.down_bias if segment == 0 else None
        down = tiles, plan.down, bias, out, layer.inner, layer.hidden
        self.projection(*down, segment=segment).start(act)

    def projection(
        self,
        tiles: Tensor,
        matrix: TritonMatrix,
        bias: Tensor | None,
        out: Tensor,
        inputs: int,
        outputs: int,
        activation: Activation | None = None,
        tokens: Tensor | None = None,
        segment: int = 0,
    ) -> Launch:
        """Return the launch of one projection of a group's tiles.

        Its first argument is the projection's input.

        The up projection has an `activation`, and `tokens`: the index in x of each entry's token.
        The down projection has neither; for a `segment`, its sums are stored in float32.
        """
        up, layer, (m, n, k, warps) = activation is not None, self.layer, self.sizes
        applied, gated = activation or Activation(), activation is not None and layer.has_gate
        arguments: tuple[Any, ...] = (
            *(tiles, tiles if tokens is None else tokens, matrix.codes, matrix.scales),
            *(matrix.others, self.plan.no_bias if bias is None else bias, out, inputs, outputs),
        )
        constants: dict[str, Any] = dict(  # noqa: C408
            ENCODING=matrix.encoding, GATHERED=tokens is not None, GATED=gated,
            INTERLEAVED=up and layer.interleaved, ACTIVATION=applied.code, BIAS=bias is not None,
            CODE_UNITS=matrix.units[0], SCALE_UNITS=matrix.units[1], SEGMENT=segment,
            enable_fp_fusion=True, GROUP=matrix.group, CHUNK=matrix.chunk,
            RUNS=chunks.RUNS.get(matrix.encoding, chunks.NO_RUNS),
        )  # fmt: skip
        numbers, floats = matrix.numbers, (float(applied.limit), float(applied.alpha))
        if self.one and matrix.group:
            rows = one_token.ROWS_OF.get(matrix.encoding, one_token.ROWS) // (2 if gated else 1)
            constants |= {"N": rows, "C": one_token.WIDTH, "num_warps": one_token.WARPS}
            constants["ONE_SCALE"] = matrix.has_one_scale(outputs, rows, constants["INTERLEAVED"])
            grid = triton.cdiv(outputs, rows), len(tiles) // 4
            arguments += (*numbers[:4], *numbers[5:7], *floats)
            return Launch(one_token.project_one, grid, arguments, constants)
        if m == FEW[0] and not gated:  # as many rows as of gate and up
            n *= 2
        least = chunks.LEAST.get(matrix.encoding, 0)
        if k < least:  # as many weights
            k, n = least, n * k // least
        constants |= {"WIDE": self.plan.wide, "M": m, "N": n, "K": k}
        constants |= {"num_warps": warps, "num_stages": STAGES}
        grid = triton.cdiv(outputs, n), len(tiles) // 4
        return Launch(programs.project, grid, (*arguments, *numbers, *floats), constants)

    def total(self) -> Tensor:
        layer, tokens = self.layer, self.routing.shape[0]
        result = torch.empty(tokens, layer.hidden, dtype=self.kind, device=self.plan.device)
        if self.order is None:  # nothing was routed here
            return result.zero_()
        self._end_segments()
        out = self.out if layer.norm is None else layer.norm(self.out)
        with on_device(self.plan.device):
            self.summation(self.weights).start(out, self.weights, self.order, result)
        return result

    def summation(self, weights: Tensor) -> Launch:
        """Return the launch of the sum over each token's experts, for gate weights like these.

        Its first arguments are those of `programs.combine`, up to the result.
        """
        hidden, (tokens, top_k) = self.layer.hidden, self.routing.shape
        product = self.kind if weights.dtype == self.kind else torch.float32
        total = self.layer.recipe.sum_dtype(self.x, weights)
        constants = {
            "ROUND_PRODUCT": self.kind in (product, total), "ROUND_SUM": total == self.kind,
            "N": SUMMED, "enable_fp_fusion": False,
        }  # fmt: skip
        grid = triton.cdiv(hidden, SUMMED), tokens
        return Launch(programs.combine, grid, (top_k, hidden), constants)

    def _end_segments(self) -> None:
        """Round the sums over segments, and add biases, as whole experts' outputs are."""
        if self.sums is None:
            return
        self.out, self.sums = self.sums.to(self.layer.dtype), None
        if self.layer.down_bias is not None:
            experts = np.repeat(self.routing.experts, np.diff(self.routing.starts))
            self.out += self.layer.down_bias[upload(experts, self.plan.device)]

    def skip_experts(self, experts: Sequence[int]) -> None:
        self.weights = self.weights.clone()
        for expert in experts:
            entries = self.routing.entries(expert)
            rows = np.ascontiguousarray(self.routing.rows[entries])
            self.out[entries] = 0
            self.weights.view(-1)[upload(rows, self.plan.device)] = 0

    def outputs_of(self, experts: Sequence[int]) -> Tensor:
        self._end_segments()
        return torch.cat([self.out[self.routing.entries(expert)] for expert in experts])

    def merge_outputs(
        self, other: Any, experts: Sequence[int], send: Callable[[Tensor], Tensor]
    ) -> None:
        self._end_segments()
        entries = self.routing.entries_of(experts)
        outputs = send(other.outputs_of(experts).to(self.out.dtype))
        for each, rows in zip(entries, outputs.split([*map(len, entries)]), strict=True):
            self.out[each.start : each.stop].copy_(rows, non_blocking=True)

    def host_kernel(self, layer: LayerExperts) -> Kernel:
        compiled = CpuKernel()
        usable = not missing_reason() and compiled.supports(layer)
        return compiled if usable else eager.UnweightedEagerKernel()


def upload(numbers: IntArray, device: torch.device) -> Tensor:
    """Copy an array of integers to a GPU without waiting, through pinned memory.

    torch keeps the pinned memory until the copy is done.
    """
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def on_device(device: torch.device) -> Any:
    """Return a context in which Triton launches go to a device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
