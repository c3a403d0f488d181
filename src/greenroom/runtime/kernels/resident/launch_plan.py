"""Build kernel arguments for consecutive layers once, and patch them for every pass.

Building the arguments takes Python a twentieth of a token's time. Only some of them change from
pass to pass: the addresses of inputs, outputs, keys and values, the number of tokens, and the
kernels' work counters. So all arguments have a copy, which is patched by a few vector operations,
and a compiled kernel copies it over the arguments that the last pass has used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from greenroom.core.pieces import Ints
from greenroom.runtime.kernels.dense.attention import KeyValueView, Positions
from greenroom.runtime.kernels.dense.batch_calls import BatchMemory, batch_calls
from greenroom.runtime.kernels.dense.blocks.mlp import MlpCalls
from greenroom.runtime.kernels.dense.blocks.router_call import RouterCall
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from greenroom.runtime.kernels.dense.stored import thread_scratch
from greenroom.runtime.kernels.dense.token_calls import AHEAD
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import Arguments, Stage, address_of
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.resident.experts import ExpertCalls, ResidentExperts
from greenroom.runtime.kernels.resident.kv_fields import KeyValueFields, KnownCaches
from greenroom.runtime.slots.resident_tables import SlotTables

STEP_INDEX = SlotTables._fields.index("step")  # of the step in SlotTables, its last item
# Bases of patched arguments: addresses of a pass's inputs and outputs, how many tokens it has, and
# how many rows of codes are multiplied one by one, then the items of SlotTables after the first.
X, OUT, COS, SIN, COUNT, SEQUENTIAL, TABLES = range(7)
STEP = TABLES + STEP_INDEX - 1


class PatchedArgument(NamedTuple):
    """A kernel argument that changes for each pass: number `base` of its values, plus `offset`."""

    target: int  # index in the copies
    base: int
    offset: int = 0


class LayerCalls(NamedTuple):
    """Kernel calls of a decoder layer and its experts.

    entries: addresses of kernels and their calls, for `run_stages`
    of_tokens: for each token, its calls of the norms and of attention
    counted: other calls, which have the number of tokens in a field of the given name
    choice:  the choice of experts
    experts: the calls for the experts
    total:   the call that adds the residual to the block's output, if that has a shared expert
    """

    entries: list[int]
    of_tokens: Sequence[Sequence[Arguments]]
    counted: Sequence[tuple[Arguments, str]]
    choice: RouterCall
    experts: ExpertCalls
    total: Arguments | None

    @property
    def arguments(self) -> list[Arguments]:
        """Return all arguments, which kernels change, in the order of the fields above."""
        of_tokens = [each for token in self.of_tokens for each in token]
        counted = [arguments for arguments, _ in self.counted]
        total = [] if self.total is None else [self.total]
        return [*of_tokens, *counted, *self.choice.choices, self.experts.all, *total]


class LaunchPlan:
    """Kernel arguments for consecutive decoder layers, for passes of up to `rows` tokens."""

    def __init__(
        self,
        decoder_layers: Sequence[FusedDecoderLayer],
        experts: Sequence[ResidentExperts],
        first_pieces: Sequence[int],
        positions: Positions,
        views: Sequence[KeyValueView],
    ) -> None:
        """Build the kernel arguments of consecutive layers.

        experts: the layers' experts for up to `rows` tokens
        first_pieces: indices of each layer's first expert in the slot tables
        positions, views: the positions of some tokens, and each layer's keys and values of one
        """
        self.rows, self._rotary = experts[0].tokens, positions[0].shape[-1]
        self._layers, self._experts = decoder_layers, experts
        self._most_tokens = AHEAD + max(view.tokens for view in views)
        attention = decoder_layers[0].attention
        hidden, dtype = attention.hidden, attention.dtype
        self._row_bytes = hidden * dtype.itemsize  # of a token's hidden state
        self._bases: Ints = np.zeros(STEP + 1, np.int64)
        # Layers share the memory that is used from stage to stage.
        self.residual, self.state = torch.empty(2, self.rows, hidden, dtype=dtype).unbind()
        self._wide = torch.empty(self.rows, hidden if experts[0].takes_wide else 0)
        self._dense = BatchMemory(decoder_layers, [self._most_tokens] * self.rows)
        self._memory = max((each.workspace() for each in experts), key=Tensor.numel)
        self._strides = (
            max(decoder_layer.stride(self.rows) for decoder_layer in decoder_layers),
            max(each.stride for each in experts),
        )
        self._scratch = self._scratch_addresses()  # allocated before its address is used
        self._shared = list[MlpCalls | None]()
        self._calls = [
            self._layer_calls(*each, positions)
            for each in zip(decoder_layers, experts, first_pieces, views, strict=True)
        ]
        self._make_copies()
        patches = np.array(list(self._patched_arguments()))
        self._targets, self._base, self._offset = patches.T.copy()
        self._caches, self._kv_targets = KnownCaches(), self._key_value_targets()
        self._regions = {0: self._make_region(0)}

    def _layer_calls(
        self,
        layer: FusedDecoderLayer,
        experts: ResidentExperts,
        first_piece: int,
        view: KeyValueView,
        positions: Positions,
    ) -> LayerCalls:
        """Make the kernel calls of a layer, whose inputs from the model are not set."""
        rows, residual, state = self.rows, self.residual, self.state
        x, one = torch.empty_like(residual), (positions[0][:, :1], positions[1][:, :1])
        stages: Sequence[Stage]
        if rows == 1:
            stages = layer.stages(x, one, view, residual, state, self._dense.works[0])
            of_tokens: Sequence[Sequence[Arguments]] = [[call for _, call in stages]]
            counted: list[tuple[Arguments, str]] = []
        else:
            stages, of_tokens = batch_calls(
                layer,
                x[None],
                [one] * rows,
                [view] * rows,
                residual[None],
                state[None],
                self._dense,
                self._wide.data_ptr() if experts.takes_wide else 0,
            )
            counted = [(call, "tokens") for _, call in stages]
        added, shared = residual.data_ptr(), None
        if layer.shared is not None:
            shared = layer.shared.calls(state.data_ptr(), rows)
            stages, added = (*stages, *shared.stages), shared.out.data_ptr()
            counted += [(call, "rows") for _, call in shared.stages]
        self._shared.append(shared)
        assert layer.router is not None
        choice = RouterCall(layer.router, state.data_ptr(), rows)
        (_, product), (_, select) = choice.stages
        counted += [(product, "rows")] if rows == 1 else [(product, "rows"), (select, "tokens")]
        region = experts.region_calls(
            (self._wide if experts.takes_wide else state).data_ptr(),
            choice.ids.data_ptr(),
            choice.weights.data_ptr(),
            added,
            self._memory,
            first_piece,
        )
        entries = [
            n for entry, arg in (*stages, *choice.stages) for n in (entry.address, address_of(arg))
        ]
        entries += [n for address in choice.chosen_addresses for n in (0, address)]
        entries += region.entries
        total = None if layer.shared is None else layer.residual_sum(residual.data_ptr(), rows)
        if total is not None:
            entries += [total[0].address, address_of(total[1])]
        last = None if total is None else total[1]
        return LayerCalls(entries, of_tokens, counted, choice, region.calls, last)

    def _make_copies(self) -> None:
        """Copy all arguments, and make the call of the kernel `copy_calls`."""
        live = [arguments for layer in self._calls for arguments in layer.arguments]
        self._copies: Ints = np.concatenate(
            [np.frombuffer(memoryview(arguments), np.int64) for arguments in live]
        )
        self._runs = (library().structure("Run") * len(live))()
        start = self._copies.ctypes.data
        for run, arguments in zip(self._runs, live, strict=True):
            run.target, run.source, run.length = address_of(arguments), start, _size(arguments)
            start += 8 * run.length
        self._copy_call = library().structure("CopyCall")(
            count=len(live), runs=ctypes.addressof(self._runs)
        )
        self._begins = [0, *accumulate(map(_size, live))]

    def _patched_arguments(self) -> Iterator[PatchedArgument]:
        """Yield the arguments of all layers that change for each pass, but for keys and values."""
        chosen: list[int] = []
        at = iter(self._begins)
        for n, (layer, experts, calls) in enumerate(
            zip(self._layers, self._experts, self._calls, strict=True)
        ):
            fields, out = layer.token_fields, n * self.rows * self._row_bytes
            for token, of_token in enumerate(calls.of_tokens):
                begins = [next(at) for _ in of_token]
                row, rotary = token * self._row_bytes, token * self._rotary * self._item_bytes
                before = (OUT, out - self.rows * self._row_bytes) if n else (X, 0)
                for some, (base, offset) in (
                    (fields.x, (before[0], before[1] + row)),
                    (fields.cos, (COS, rotary)),
                    (fields.sin, (SIN, rotary)),
                ):
                    for stage, name in some:
                        target = begins[stage] + _offset(of_token[stage], name)
                        yield PatchedArgument(target, base, offset)
            for arguments, name in calls.counted:
                yield PatchedArgument(next(at) + _offset(arguments, name), COUNT)
            chosen += [next(at) + _offset(choice, "chosen") for choice in calls.choice.choices]
            begin = next(at)
            for index in experts.output_indices:
                yield PatchedArgument(begin + index, OUT, out)
            for index, added in experts.count_indices:
                yield PatchedArgument(begin + index, COUNT, added)
            yield PatchedArgument(begin + experts.sequential_index, SEQUENTIAL)
            tables = begin + experts.tables_index
            for i in range(1, STEP_INDEX):
                yield PatchedArgument(tables + i, TABLES + i - 1)
            yield PatchedArgument(tables + STEP_INDEX, STEP, n)
            if (total := calls.total) is not None:
                begin = next(at)
                yield PatchedArgument(begin + _offset(total, "y"), OUT, out)
                yield PatchedArgument(begin + _offset(total, "sum"), OUT, out)
                yield PatchedArgument(begin + _offset(total, "more"), COUNT, -1)
        self._chosen = np.array(chosen).reshape(len(self._layers), self.rows)

    @property
    def _item_bytes(self) -> int:
        return self.state.itemsize

    def _key_value_targets(self) -> Ints:
        """Return the indices of fields of keys and values in the copies [rows, layers, fields]."""
        targets = np.empty((self.rows, len(self._layers), KeyValueFields.COUNT), np.int64)
        at = iter(self._begins)
        for n, (layer, calls) in enumerate(zip(self._layers, self._calls, strict=True)):
            for token, of_token in enumerate(calls.of_tokens):
                begins = [next(at) for _ in of_token]
                targets[token, n] = [
                    begins[stage] + _offset(of_token[stage], name)
                    for stage, name in layer.key_value_fields
                ]
            for _ in calls.arguments[self.rows * len(of_token) :]:
                next(at)
        return targets

    def _make_region(self, first: int) -> tuple[Any, Any]:
        """Make the call of `run_stages` for the layers from number `first` on, and its stages."""
        entries = [n for each in self._calls[first:] for n in each.entries]
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
        return thread_scratch(dense), self._experts[0].scratch(experts)

    def fits(self, positions: Positions, most_tokens: int) -> bool:
        """Check that the stored kernel arguments are valid for a pass.

        `most_tokens` is the largest number of tokens in a KV cache.
        """
        return (
            most_tokens <= self._most_tokens
            and positions[0].shape[-1] == self._rotary
            and self._scratch_addresses() == self._scratch
        )

    def empty_outputs(self) -> Tensor:
        """Allocate memory for the outputs of all layers, [layers, 1, rows, hidden]."""
        hidden = self.state.shape[-1]
        return torch.empty(len(self._layers), 1, self.rows, hidden, dtype=self.state.dtype)

    def set_tokens(
        self,
        x: Tensor,
        positions: Positions,
        views: Sequence[Sequence[KeyValueView]],
        outputs: Tensor,
    ) -> None:
        """Patch the kernel arguments for the tokens of the next pass.

        x:       [1, tokens, hidden]
        views:   each token's keys and values, in each layer
        outputs: memory from `empty_outputs`, for the layers' outputs
        """
        for targets, of_token in zip(self._kv_targets, views, strict=False):
            self._copies[targets] = self._caches.fields(of_token)
        self._copies[self._chosen] = np.arange(self.rows) >= len(views)  # of unused rows: chosen
        inputs = (x, outputs, *positions)
        self._bases[X : SIN + 1] = [each.data_ptr() for each in inputs]
        self._bases[COUNT] = len(views)

    def run(self, first: int, tables: SlotTables) -> list[int]:
        """Compute the layers from number `first` on for the tokens of a pass.

        Return how many experts each computed layer had. The computation stops at a layer whose
        experts torch must choose, or of which a chosen expert is not loaded. `tables` are the slot
        tables of layer `first`.
        """
        self._bases[SEQUENTIAL] = self._experts[0].sequential_rows
        self._bases[TABLES : STEP + 1] = tables[1:]
        self._bases[STEP] -= first
        self._copies[self._targets] = self._offset + self._bases[self._base]
        self._copy_call.cursor = 0
        if first not in self._regions:
            self._regions[first] = self._make_region(first)
        region = self._regions[first][0]
        region.progress = 0
        kernel_entry("run_stages")(address_of(region))
        counts = [calls.experts.search.found for calls in self._calls[first:]]
        return counts[: counts.index(0)] if 0 in counts else counts

    def shared(self, layer: int) -> Callable[[], Tensor] | None:
        """Return what returns the output of a layer's shared expert [tokens, hidden]."""
        calls, count = self._shared[layer], int(self._bases[COUNT])
        return None if calls is None else lambda: calls.out[:count]

    def choice(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the expert ids and gate weights that were chosen in a layer, [tokens, top_k]."""
        return self._calls[layer].choice.result(int(self._bases[COUNT]))


def _size(arguments: Arguments) -> int:
    return memoryview(arguments).nbytes // 8


def _offset(arguments: Arguments, name: str) -> int:
    """Return the index of a field of eight bytes in a kernel's arguments."""
    return int(getattr(type(arguments), name).offset) // 8
