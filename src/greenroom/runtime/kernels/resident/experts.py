"""Compute a few tokens' resident experts, from the router's choice to their sum.

The compiled kernels run with calls that are copied from a template. After a group of experts has
evicted the CPU caches, Python's lists and NumPy's views take as long as the sum over the experts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from greenroom.runtime.kernels.activation import RAW
from greenroom.runtime.kernels.cpu import CpuKernel, CpuStep
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.slots.resident_tables import SlotTables

# Driver.resident_steps for one layer; the callable computes it and returns its expert counts.
RunResident = Callable[[Callable[[SlotTables], tuple[int, ...]]], int | None]


@cache
def calls_type(tokens: int, top_k: int) -> Any:
    """Make the structure of all kernel calls for some tokens' experts, and of their lists."""
    structure = library().structure
    entries = tokens * top_k
    chosen = ctypes.c_int64 * entries
    fields = [
        ("search", structure("SlotSearch")),
        ("pack", structure("PackCall")),
        ("group", structure("GroupCall")),
        ("sum", structure("SumCall")),
        ("norm", structure("NormCall")),
        ("region", structure("StagesCall")),
        ("stages", structure("Stage") * 3),
        ("routing", structure("Routing")),
        *((name, chosen) for name in ("experts", "slots", "finished", "tokens", "rows")),
        ("starts", ctypes.c_int64 * (entries + 1)),
    ]
    return type("ExpertCalls", (ctypes.Structure,), {"_fields_": fields})


class ExpertCalls:
    """Kernel calls for some tokens' experts, in memory of their own.

    search, pack, group, sum, norm: the kernels' calls
    """

    __slots__ = ("_first", "address", "all", "group", "norm", "pack", "search", "sum")

    def __init__(self, template: Any) -> None:
        """Copy a template (see `calls_type`), and set the addresses that lie in the copy."""
        kind = type(template)
        calls = self.all = kind.from_buffer_copy(template)
        base = self.address = ctypes.addressof(calls)
        at = {name: base + getattr(kind, name).offset for name, _ in kind._fields_}
        routing, search, group = calls.routing, calls.search, calls.group
        for name in ("experts", "starts", "tokens", "rows"):
            setattr(routing, name, at[name])
        for name in ("slots", "starts", "tokens", "rows"):
            setattr(search, name, at[name])
        search.sorted = at["experts"]
        group.routing = calls.sum.routing = at["routing"]
        group.experts, group.slots, group.finished = at["experts"], at["slots"], at["finished"]
        counts = at["routing"] + type(routing).count.offset, at["group"] + type(group).count.offset
        search.found_places[:] = counts
        for stage, name in zip(calls.stages, ("group", "sum", "norm"), strict=True):
            stage.call = at[name]
        calls.region.stages = at["stages"]
        self.search, self.pack, self.group = search, calls.pack, group
        self.sum, self.norm = calls.sum, calls.norm
        self._first = bytes(calls)

    def reset(self) -> None:
        """Set counters to 0, and all arguments to those of the template."""
        ctypes.memmove(self.address, self._first, len(self._first))

    @property
    def region_address(self) -> int:
        """Return the address of the call that computes the experts and their sum."""
        return self.address + int(type(self.all).region.offset)


class ResidentExperts:
    """One MoE layer's experts for a few tokens, with precomputed kernel calls.

    Each token chooses `top_k` experts, with gate weights of one data type.

    tokens: their largest number
    takes_wide: do kernels read the tokens' hidden states in float32?
    """

    def __init__(
        self,
        kernel: CpuKernel,
        layer: LayerExperts,
        tokens: int,
        top_k: int,
        weights: torch.dtype,
    ) -> None:
        plan, hidden = layer_plan(layer, kernel.name), layer.hidden
        self._kernel, self._plan, self.tokens = kernel, plan, tokens
        self._dtype, self._hidden, self._top_k = layer.dtype, hidden, top_k
        self._weights = layer.dtype if weights is layer.dtype else torch.float32
        # The calls of the kernel for tokens that choose the first experts.
        routing = Routing.of(np.arange(top_k)[None].repeat(tokens, 0), layer.num_experts)
        x = torch.zeros(tokens, hidden, dtype=layer.dtype)
        step = CpuStep(kernel, layer, x, routing, torch.zeros(tokens, top_k, dtype=weights))
        start = step.addresses[1]
        self._mid, self._act, self._out = (step.addresses[n] - start for n in (1, 2, 3))
        self._sums, self._packed = 4 * step.sums, 4 * step.buffer.numel()
        self._floats = step.buffer.numel() + tokens * hidden
        self._type = calls_type(tokens, top_k)
        group = step.group_call(plan, range(top_k), [0] * top_k)[0]
        calls = self._template = self._type(group=group, sum=step.sum_call(plan)[0])
        calls.starts[: top_k + 1] = range(0, tokens * top_k + 1, tokens)
        self.takes_wide = not group.narrow
        self._packs = bool(group.packed)
        if self._packs:
            calls.pack.planes, calls.pack.columns = plan.up_planes, hidden
        calls.norm.columns, calls.norm.more, calls.routing.count = hidden, tokens - 1, top_k
        calls.pack.rows = calls.search.count = tokens
        calls.search.top_k, calls.search.experts = top_k, layer.num_experts
        calls.region.count = len(calls.stages)
        entries = plan.group_entry, plan.sum_entry, plan.norm_entry
        for stage, entry in zip(calls.stages, entries, strict=True):
            stage.kernel = entry.address
        self._run_stages = kernel_entry("run_stages")
        self._find_slots = kernel_entry("find_slots")
        self._local = threading.local()

    @staticmethod
    def of(
        kernel: object, layer: LayerExperts, tokens: int, top_k: int, weights: torch.dtype
    ) -> ResidentExperts | None:
        """Make the `ResidentExperts` of an MoE layer.

        Return None if no compiled kernel computes the layer with its activation.
        """
        if (
            not isinstance(kernel, CpuKernel)
            or not kernel.supports(layer)
            or layer.norm is not None
        ):
            return None
        raw = layer_plan(layer, kernel.name).activation.code == RAW
        if raw or top_k > layer.num_experts:
            return None
        return ResidentExperts(kernel, layer, tokens, top_k, weights)

    def __call__(
        self, run_resident: RunResident, x: Tensor, index: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor | None:
        """Compute the experts of one token, and return their sum plus the residual: [1, H].

        Only with `tokens` = 1.

        run_resident: calls a function with the layer's slot tables if all experts are resident;
                      returns 1 if the function found the slots of the chosen experts, else 0 or
                      None
        x, residual: [1, H]
        index, weights: the chosen expert ids and their gate weights [1, top_k]

        Return None if the inputs have another type or size, or if no expert was computed.
        """
        if (
            index.dtype is not torch.int64
            or index.numel() != self._top_k
            or x.dtype is not self._dtype
            or residual.dtype is not self._dtype
            or not (x.is_contiguous() and index.is_contiguous() and residual.is_contiguous())
        ):
            return None
        if weights.dtype is not self._weights or not weights.is_contiguous():
            weights = weights.to(self._weights).contiguous()
        buffer = self.workspace()
        result, calls = torch.empty_like(x), self._thread_calls()
        self._set_inputs(calls, x.data_ptr(), weights.data_ptr(), residual.data_ptr(), buffer)
        out = result.data_ptr()
        calls.sum.result = calls.norm.y = calls.norm.sum = out

        def region(tables: SlotTables) -> tuple[int, ...]:
            search = calls.search
            search.ids, search.tables = index.data_ptr(), tables
            self._find_slots(calls.address, False)
            if not search.found:
                return ()
            self._run_stages(calls.region_address)
            return (self._top_k,)

        return result if run_resident(region) else None

    def workspace(self) -> Tensor:
        """Allocate the memory of one kernel call for the tokens' experts."""
        return torch.empty(self._floats)

    def _thread_calls(self) -> ExpertCalls:
        """Return the calling thread's kernel calls, as in the template."""
        calls: ExpertCalls | None = getattr(self._local, "calls", None)
        if calls is None:
            calls = self._local.calls = ExpertCalls(self._template)
        else:
            calls.reset()
        return calls

    def _set_inputs(
        self, calls: ExpertCalls, x: int, weights: int, residual: int, buffer: Tensor
    ) -> None:
        """Set the addresses of the tokens' inputs and of memory in kernel calls."""
        group, total, start = calls.group, calls.sum, buffer.data_ptr()
        group.x, total.weights, calls.norm.x = x, weights, residual
        group.mid, group.act = start + self._mid, start + self._act
        group.out = total.outputs = start + self._out
        total.sums = start + self._sums
        if self._packs:
            calls.pack.x, calls.pack.out = x, start + self._packed
            group.packed = calls.pack.out
        group.scratch = self._kernel.scratch(self._plan.scratch)[0]

    def accepts(self, weights: torch.dtype) -> bool:
        """Check that gate weights of a data type are used without conversion."""
        return weights is self._weights

    @property
    def stride(self) -> int:
        """Return how many bytes of scratch memory experts need per thread."""
        return self._plan.scratch

    def scratch(self, stride: int) -> int:
        """Return the address of the calling thread's scratch memory for experts.

        Each of torch's OpenMP threads uses `stride` bytes of it. The memory moves when it grows.
        """
        return self._kernel.scratch(stride)[0]

    def region_calls(
        self, x: int, index: int, weights: int, residual: int, buffer: Tensor, first: int
    ) -> RegionCalls:
        """Make kernel calls of an MoE layer's experts for a region of several layers.

        x, index, weights, residual: addresses, whose values are computed in the region; x is in
                                     float32 if `takes_wide`
        buffer: memory from `workspace`
        first: index of the layer's first expert in the tables of slots

        The output's address, the slot tables and the number of tokens must be set afterwards. The
        kernels compute nothing if a chosen expert is not loaded.
        """
        calls = ExpertCalls(self._template)
        self._set_inputs(calls, x, weights, residual, buffer)
        calls.search.ids, calls.search.tables.first = index, first
        count = calls.address + type(calls.search).found.offset
        stages = [n for stage in calls.all.stages for n in (stage.kernel, stage.call)]
        if self._packs:
            pack = calls.address + self._type.pack.offset
            stages = [kernel_entry("pack_rows").address, pack, *stages]
        return RegionCalls(calls, (self._find_slots.address, calls.address, 0, count, *stages))

    @property
    def tables_index(self) -> int:
        """Return the index in the calls, in int64, at which the expert slot tables begin."""
        return self._index("search", "tables")

    @property
    def output_indices(self) -> tuple[int, ...]:
        """Return the indices in the calls, in int64, of the output's address."""
        return tuple(
            self._index(*place) for place in (("sum", "result"), ("norm", "y"), ("norm", "sum"))
        )

    @property
    def count_indices(self) -> tuple[tuple[int, int], ...]:
        """Return where the number of tokens is in the calls: (index in int64, what is added)."""
        return (
            (self._index("search", "count"), 0),
            (self._index("pack", "rows"), 0),
            (self._index("sum", "tokens"), 0),
            (self._index("norm", "more"), -1),
        )

    @property
    def sequential_index(self) -> int:
        """Return the index in the calls, in int64, of `sequential_rows` of a group."""
        return self._index("group", "sequential_rows")

    @property
    def sequential_rows(self) -> int:
        """Return up to how many rows are multiplied with codes one by one now."""
        return self._kernel.sequential_rows

    def _index(self, call: str, field: str) -> int:
        place = getattr(self._type, call)
        kind = type(getattr(self._template, call))
        return int(place.offset + getattr(kind, field).offset) // 8


class RegionCalls(NamedTuple):
    """Kernel calls of an MoE layer's experts in a region of several layers.

    calls:   the calls, which must stay alive until the region has ended
    entries: addresses of kernels and their calls, for `run_stages`
    """

    calls: ExpertCalls
    entries: tuple[int, ...]
