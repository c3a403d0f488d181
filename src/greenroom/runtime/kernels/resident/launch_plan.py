"""Build kernel arguments for consecutive layers once, and patch them for every token.

Building the arguments takes Python a twentieth of a token's time. Only some of them change from
token to token: the addresses of inputs and outputs, the positions of keys and values, and the
kernels' work counters. So all arguments have a copy, which is patched by a few vector operations,
and a compiled kernel copies it over the arguments that the last token has used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from greenroom.runtime.kernels.dense.router import RouterCall
from greenroom.runtime.kernels.dense.stored import thread_scratch
from greenroom.runtime.kernels.dense.token_calls import AHEAD
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import Arguments, address_of
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.resident.one_token import OneTokenCalls, OneTokenExperts
from greenroom.runtime.slots.resident_tables import SlotTables

STEP_INDEX = SlotTables._fields.index("step")  # of the step in SlotTables, its last item
# Bases of patched arguments: addresses of a token's inputs and outputs, then the items of
# SlotTables after the first.
NONE, X, OUT, COS, SIN, TABLES = range(6)
STEP = TABLES + STEP_INDEX - 1


class PatchedArgument(NamedTuple):
    """A kernel argument that changes for each token.

    Its value is a sum: number `base` of the token's own values (such as the address of its hidden
    state), `offset`, and `per_token` times the number of tokens in the layer's KV cache.
    """

    target: int  # index in the copies
    layer: int
    base: int
    offset: int = 0
    per_token: int = 0


class LaunchPlan:
    """Kernel arguments for consecutive decoder layers, for the tokens of one KV cache."""

    def __init__(
        self,
        decoder_layers: Sequence[FusedDecoderLayer],
        experts: Sequence[OneTokenExperts],
        first_pieces: Sequence[int],
        x: Tensor,
        positions: Positions,
        views: Sequence[KeyValueView],
    ) -> None:
        """Build the kernel arguments of consecutive layers for tokens like x [1, 1, hidden].

        `first_pieces` are the indices of each layer's first expert in the slot tables.
        """
        self._count, self._rotary = len(decoder_layers), positions[0].shape[-1]
        self._max_tokens = AHEAD + max(view.tokens for view in views)
        # Weak references: the plan must not keep a finished request's cache in memory.
        self._tensors = [ref(each) for view in views for each in view[:2]]
        self._bytes = x.nbytes  # of an output
        self._bases: Ints = np.zeros(STEP + 1, np.int64)
        # Layers share the memory that is used from stage to stage.
        self.residual, self.state = torch.empty(2, 1, x.shape[-1], dtype=x.dtype).unbind()
        self._work = max(
            (decoder_layer.workspace(self._max_tokens) for decoder_layer in decoder_layers),
            key=Tensor.numel,
        )
        self._memory = max((each.workspace() for each in experts), key=Tensor.numel)
        self._strides = (
            max(decoder_layer.attention.stride for decoder_layer in decoder_layers),
            max(each.stride for each in experts),
        )
        self._kernel = experts[0]
        self._scratch = self._scratch_addresses()  # allocated before its address is used

        self.router_calls: list[RouterCall] = []
        self._expert_calls: list[OneTokenCalls] = []
        self._entries: list[list[int]] = []
        stages: list[list[Arguments]] = []
        for decoder_layer, view, layer_experts, first in zip(
            decoder_layers, views, experts, first_pieces, strict=True
        ):
            before, call = decoder_layer.stages_to_choice(
                x, positions, view, self.residual, self.state, self._work
            )
            region = layer_experts.region_calls(
                self.state.data_ptr(),
                call.ids.data_ptr(),
                call.weights.data_ptr(),
                self.residual.data_ptr(),
                self._memory,
                first,
            )
            entries = [n for entry, arg in before for n in (entry.address, address_of(arg))]
            self._entries.append([*entries, 0, call.chosen_address, *region.entries])
            self._expert_calls.append(region.calls)
            self.router_calls.append(call)
            stages.append([*(arguments for _, arguments in before), region.calls.all])
        self._make_copies(stages)
        patches = np.array(list(self._patched_arguments(stages, decoder_layers, experts, views)))
        self._targets, self._layer, self._base, self._offset, self._per_token = patches.T.copy()
        self._regions = {0: self._make_region(0)}

    def _make_copies(self, stages: Sequence[Sequence[Arguments]]) -> None:
        """Copy all arguments, and make the call of the kernel `copy_calls`."""
        live = [arguments for layer in stages for arguments in layer]
        self._copies: Ints = np.concatenate(
            [np.frombuffer(memoryview(arguments), np.int64) for arguments in live]
        )
        self._live = live
        self._runs = (library().structure("Run") * len(live))()
        start = self._copies.ctypes.data
        for run, arguments in zip(self._runs, live, strict=True):
            run.target, run.source, run.length = address_of(arguments), start, _size(arguments)
            start += 8 * run.length
        self._copy_call = library().structure("CopyCall")(
            count=len(live), runs=ctypes.addressof(self._runs)
        )

    def _patched_arguments(
        self,
        stages: Sequence[Sequence[Arguments]],
        decoder_layers: Sequence[FusedDecoderLayer],
        experts_of_layers: Sequence[OneTokenExperts],
        views: Sequence[KeyValueView],
    ) -> Iterator[PatchedArgument]:
        """Yield the arguments of all layers that change for each token."""
        keys = [_rows(view.keys) for view in views]
        values = [_rows(view.values) for view in views]
        start = 0
        for n, (layer, decoder_layer, experts) in enumerate(
            zip(stages, decoder_layers, experts_of_layers, strict=True)
        ):
            begins = [start + at for at in accumulate([0, *map(_size, layer)])]
            start, last = begins.pop(), begins[-1]

            def indices(
                fields: Sequence[tuple[int, str]],
                begins: list[int] = begins,
                layer: Sequence[Arguments] = layer,
            ) -> Iterator[int]:
                for stage, name in fields:
                    yield begins[stage] + getattr(type(layer[stage]), name).offset // 8

            patched, tables = decoder_layer.token_fields, last + experts.tables_index
            for at in indices(patched.x):  # the first layer's input comes from the model
                yield (
                    PatchedArgument(at, n, OUT, (n - 1) * self._bytes)
                    if n
                    else PatchedArgument(at, n, X)
                )
            for base, positions in ((COS, patched.cos), (SIN, patched.sin)):
                yield from (PatchedArgument(at, n, base) for at in indices(positions))
            for (address, row), positions in ((keys[n], patched.key), (values[n], patched.value)):
                yield from (
                    PatchedArgument(at, n, NONE, address - row, row) for at in indices(positions)
                )
            yield from (PatchedArgument(at, n, NONE, 0, 1) for at in indices(patched.tokens))
            yield from (
                PatchedArgument(last + at, n, OUT, n * self._bytes) for at in experts.output_indices
            )
            yield from (
                PatchedArgument(tables + i, n, TABLES + i - 1) for i in range(1, STEP_INDEX)
            )
            yield PatchedArgument(tables + STEP_INDEX, n, STEP, n)

    def _make_region(self, first: int) -> tuple[Any, Any]:
        """Make the call of `run_stages` for the layers from number `first` on, and its stages."""
        entries = [n for each in self._entries[first:] for n in each]
        stages = (library().structure("Stage") * (1 + len(entries) // 2))()
        stages[0].kernel = kernel_entry("copy_calls").address
        stages[0].call = address_of(self._copy_call)
        for stage, kernel, call in zip(stages[1:], entries[::2], entries[1::2], strict=True):
            stage.kernel, stage.call = kernel, call
        call = library().structure("StagesCall")(count=len(stages), stages=ctypes.addressof(stages))
        return call, stages

    def _scratch_addresses(self) -> tuple[int, int]:
        """Return the addresses of this thread's scratch memory, for dense layers and experts."""
        dense, experts = self._strides
        return thread_scratch(dense), self._kernel.scratch(experts)

    def fits(self, positions: Positions, views: Sequence[KeyValueView]) -> bool:
        """Check that the addresses in the stored kernel arguments are valid for a token."""
        tensors = [each for view in views for each in view[:2]]
        return (
            all(map(is_, [find() for find in self._tensors], tensors))
            and max(view.tokens for view in views) <= self._max_tokens
            and positions[0].shape[-1] == self._rotary
            and self._scratch_addresses() == self._scratch
        )

    def set_token(
        self, x: Tensor, positions: Positions, views: Sequence[KeyValueView], outputs: Tensor
    ) -> None:
        """Patch the kernel arguments for the next token.

        `outputs` [layers, 1, 1, hidden] receives the layers' outputs.
        """
        tokens = np.array([view.tokens for view in views])
        self._values = self._offset + self._per_token * tokens[self._layer]
        inputs = (x, outputs, *positions)
        self._bases[X : SIN + 1] = [each.data_ptr() for each in inputs]

    def run(self, first: int, tables: SlotTables) -> list[int]:
        """Compute the layers from number `first` on for one token.

        Return how many experts each computed layer had. The computation stops at a layer whose
        experts torch must choose, or of which a chosen expert is not loaded. `tables` are the slot
        tables of layer `first`.
        """
        self._bases[TABLES : STEP + 1] = tables[1:]
        self._bases[STEP] -= first
        self._copies[self._targets] = self._values + self._bases[self._base]
        self._copy_call.cursor = 0
        if first not in self._regions:
            self._regions[first] = self._make_region(first)
        region = self._regions[first][0]
        region.progress = 0
        kernel_entry("run_stages")(address_of(region))
        counts = [calls.search.found for calls in self._expert_calls[first:]]
        return counts[: counts.index(0)] if 0 in counts else counts


def _size(arguments: Arguments) -> int:
    return memoryview(arguments).nbytes // 8


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Return (address of keys or values, bytes from token to token)."""
    return tensor.data_ptr(), tensor.stride(2) * tensor.itemsize
