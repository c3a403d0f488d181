"""The default kernel on a CPU: one compiled call a wave, at the speed of memory.

Weights are read in place from the slots, widened in registers and multiplied in float32; values
are rounded where eager rounds them. Encoded weights are expanded in registers too, to the values
that their format says (matrix.py). An element of the result depends only on its token, its experts
and their weights: not on the wave, the slot, the batch, or the number of threads. (Of encoded
experts it depends on the batch: those with few tokens multiply them one by one, by whole numbers.
`alone` makes all do so.) The down projection is
summed in blocks of 64 of the intermediate dimension, so an expert can be cut at such a boundary
into pieces that are computed one after the other, without changing a bit.

A layer that has no compiled product (`LayerExperts.unfused` says why) is left to the eager kernel.
So is a float32 model by default: there the order of summation is the whole distance to eager, and
transformers' `grouped_mm`, which calls the same matrix product as eager, is nearer to it than any
other order can be.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from greenroom.core.layout import PLAIN
from greenroom.runtime.kernels import compiled, eager, gating, layers, sequence
from greenroom.runtime.kernels.activation import Activation, find_activation
from greenroom.runtime.kernels.base import LayerExperts
from greenroom.runtime.kernels.eager import Eager
from greenroom.runtime.kernels.matrix import Matrix
from greenroom.runtime.kernels.openmp import Body, body
from greenroom.runtime.kernels.routing import Routing

_ALL = 1 << 62
_SERIAL = 1 << 16  # elements below which the sum over experts is not worth a second thread


def _bits(value: float) -> int:
    """A float32's bits."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class Plan:
    """What never changes for a layer: compiled bodies and the constant words of their arguments."""

    __slots__ = (
        *("activation", "combine", "combine_bias", "join", "matrices", "narrow_steps", "rounded"),
        *("scratch", "steps", "tail", "up_bias", "wave"),
    )

    def __init__(self, layer: LayerExperts, rounded: bool = False) -> None:
        self.activation: Activation = find_activation(layer)
        self.rounded = rounded
        weights = layer.up_weight, layer.down_weight
        encoded = any(weight.encoding != PLAIN for weight in weights)
        by_columns = layer.transposed and not encoded
        self.wave: Body = body(compiled.wave, layer.dtype, by_columns, encoded)
        self.combine: Body = body(compiled.combine, layer.dtype)
        self.join: Body = body(layers.join, layer.dtype)
        self.matrices = [Matrix(w, layer.dtype, rounded) for w in weights] if encoded else []
        # Bytes a thread: weight rows widened together, or a block of a strip and a panel's sums;
        # three more rows are for what an encoded product needs.
        rows = (compiled.GROUP + 3) * max(layer.hidden, layer.inner) + 1024
        strip = compiled.BLOCK * compiled.STRIP * compiled.LANES + 1024
        self.scratch = 4 * (max(rows, strip) + -(-layer.hidden // 16) * 16)  # and one token's x
        self.up_bias, self.combine_bias = layer.up_bias, layer.down_bias
        # Channels and columns claimed together: a unit's first rows are waited for, and those of
        # encoded matrices are short. A transposed matrix is read along its long rows where each
        # expert has one token, and in narrow strips for several tokens at once.
        long = min(512, -(-layer.inner // 256) * 128), min(1024, -(-layer.hidden // 256) * 128)
        self.steps = long if by_columns else (64, 128) if encoded else (32, 64)
        self.narrow_steps = (128, 128) if by_columns else (32, 64)
        self.tail = [
            *(layer.slots.base, layer.slots.stride, layer.up.offset, layer.down.offset),
            *(layer.hidden, layer.inner, layer.width),
            *(int(layer.interleaved), 0 if self.up_bias is None else self.up_bias.data_ptr()),
            *(self.activation.code, _bits(self.activation.limit), _bits(self.activation.alpha)),
            int(layer.recipe.compute is None),
            *([word for m in self.matrices for word in m.words] or [0] * 4),
        ]


def plan_of(layer: LayerExperts, rounded: bool = False) -> Plan:
    """The layer's plan, made at its first use; `rounded` as for `Matrix`."""
    if not isinstance(layer.plan, Plan) or layer.plan.rounded != rounded:
        layer.plan = Plan(layer, rounded)
    return layer.plan


class Step:
    """A step under way.

    All float32, one after another in `buffer`: mid [S, 2I], act [S, I], out [T * K, H] and
    sums [T, H], where S is the number of entries of the routing.
    """

    __slots__ = (
        *("buffer", "kept", "layer", "narrow", "out", "residual", "result", "routing"),
        *("routing_words", "sums", "weights", "words", "x"),
    )

    def __init__(self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor) -> None:
        self.layer, self.x, self.routing, self.weights = layer, x, routing, weights
        self.residual: Tensor | None = None  # [T, H], what the result is added to
        self.result: Tensor | None = None  # where it was computed with the last wave
        # One token stays as it is: torch's conversion takes longer than the kernel's own.
        self.narrow = len(x) == 1 and x.dtype is layer.dtype and x.is_contiguous()
        wide = x if self.narrow else x.float().contiguous()
        self.kept = wide  # its memory is in use until the last wave
        (tokens, top_k), entries, count = routing.shape, len(routing.rows), len(routing.experts)
        act = entries * layer.width
        self.out = act + entries * layer.inner
        self.sums = self.out + tokens * top_k * layer.hidden
        self.buffer = torch.empty(self.sums + tokens * layer.hidden)
        experts, start = routing.address, self.buffer.data_ptr()
        at = experts + 8 * (2 * count + 1)
        self.routing_words = count, experts, experts + 8 * count, at, at + 16 * entries
        self.words = wide.data_ptr(), start, start + 4 * act, start + 4 * self.out

    def matrix(self, start: int, rows: int, columns: int) -> Tensor:
        """A part of the buffer as a matrix."""
        return self.buffer[start : start + rows * columns].view(rows, columns)


class Fused:
    """`kernels="numba"`; `float32` says whether float32 models are computed here too."""

    name = "numba"
    rounded = False  # are encoded weights rounded to the model's type, as transformers' expansion?

    def __init__(self, float32: bool = False) -> None:
        self.apart = compiled.FEW  # tokens of an encoded expert up to which each is by itself
        self._float32 = float32
        self._local = threading.local()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For the while every token has the bits that it has alone, of encoded experts too."""
        before, self.apart = self.apart, _ALL
        try:
            yield
        finally:
            self.apart = before

    def fuses(self, layer: LayerExperts) -> bool:
        """Is a layer computed here, or left to the eager kernel?"""
        return not layer.unfused and (self._float32 or layer.dtype is not torch.float32)

    def begin(
        self, layer: LayerExperts, x: Tensor, routing: Routing, weights: Tensor
    ) -> Step | eager.Step:
        """Start a step: x [T, H], weights [T, K]."""
        if not self.fuses(layer):
            return Eager().begin(layer, x, routing, weights)
        return Step(layer, x, routing, weights)

    def wave(
        self,
        step: Step | eager.Step,
        experts: Sequence[int],
        slots: Sequence[int],
        part: LayerExperts | None = None,
        carry: bool = False,
    ) -> None:
        """Compute experts of the step from their slots.

        part:  where only a piece of each expert is computed, the layer as that piece's layout
               describes it: some multiple of 64 of the intermediate dimension
        carry: add to what the pieces before left, rather than start from nothing
        """
        if isinstance(step, eager.Step):
            return Eager().wave(step, experts, slots)
        layer = part or step.layer
        plan = plan_of(layer, self.rounded)
        if plan.activation.code != gating.RAW:
            words = self.words_of_wave(plan, step, experts, slots, carry, True, True)
            whole = part is None and len(experts) == len(step.routing.experts)
            if whole and step.narrow and layer.norm is None:
                return self._at_once(plan, step, words)
            plan.wave(words.buffer_info()[0])
            return None
        self._call(plan, step, experts, slots, carry, True, False)
        self._gate(layer, step, experts)
        return self._call(plan, step, experts, slots, carry, False, True)

    def combine(self, step: Step | eager.Step) -> Tensor:
        """The sum over each token's experts [T, H], in x's type, by ascending id."""
        if isinstance(step, eager.Step):
            return Eager().combine(step)
        if step.result is not None:
            return step.result
        layer, routing = step.layer, step.routing
        plan = plan_of(layer, self.rounded)
        if layer.norm is not None:
            self._norm(step, layer.norm)
        words, result, _ = self.words_of_sum(plan, step)
        plan.combine(words.buffer_info()[0], len(routing.rows) * layer.hidden > _SERIAL)
        return result if step.residual is None else step.residual + result

    def _at_once(self, plan: Plan, step: Step, wave: array[int]) -> None:
        """One token's only wave, the sum over its experts, and what that is added to."""
        words, result, _weights = self.words_of_sum(plan, step)
        stages, residual = [(plan.wave, wave), (plan.combine, words)], step.residual
        if residual is not None:
            hidden = residual.shape[-1]
            join = array("q", [0] * layers.JOIN_WORDS)
            join[layers.J_X], join[layers.J_Y] = residual.data_ptr(), result.data_ptr()
            join[layers.J_SUM], join[layers.J_COLUMNS] = result.data_ptr(), hidden
            stages.append((plan.join, join))
        sequence.run(stages)
        step.result = result

    def words_of_sum(self, plan: Plan, step: Step) -> tuple[array[int], Tensor, Tensor]:
        """(the words of `combine`, where it leaves the result [T, H], what must live until then)"""
        layer, routing, x = step.layer, step.routing, step.x
        tokens, hidden = routing.shape[0], layer.hidden
        bias = None if layer.norm is not None else plan.combine_bias
        rounds = layer.recipe.compute is None
        dtype = layer.recipe.sum_dtype(x, step.weights)
        product = x.dtype if rounds and step.weights.dtype == x.dtype else torch.float32
        weights = step.weights
        narrow = weights.dtype is layer.dtype and weights.is_contiguous()
        if not narrow:
            weights = weights.float().contiguous()
        result = torch.empty(tokens, hidden, dtype=x.dtype)
        out = step.words[3]
        words = array(
            "q",
            [
                *(0, tokens, hidden, *step.routing_words, out, weights.data_ptr()),
                *(out + 4 * (step.sums - step.out), result.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), int(rounds)),
                int(x.dtype in (product, dtype)),
                *(int(dtype == x.dtype), int(narrow)),
            ],
        )
        return words, result, weights

    def _call(
        self,
        plan: Plan,
        step: Step,
        experts: Sequence[int],
        slots: Sequence[int],
        carry: bool,
        up: bool,
        down: bool,
    ) -> None:
        """Run the compiled wave."""
        words = self.words_of_wave(plan, step, experts, slots, carry, up, down)
        plan.wave(words.buffer_info()[0])

    def words_of_wave(
        self,
        plan: Plan,
        step: Step,
        experts: Sequence[int],
        slots: Sequence[int],
        carry: bool = False,
        up: bool = True,
        down: bool = True,
    ) -> array[int]:
        """The words of a wave; they are named in compiled.py."""
        count, entries = len(experts), len(step.routing.rows)
        scratch, stride = self.scratch(plan.scratch)
        steps = plan.narrow_steps if entries > len(step.routing.experts) else plan.steps
        return array(
            "q",
            [
                *(0, 0, up, down, count, *step.routing_words, carry, *step.words),
                *(scratch, stride, *plan.tail, *steps, step.narrow, self.apart),
                *(*slots, *experts, *[0] * count),
            ],
        )

    def scratch(self, stride: int) -> tuple[int, int]:
        """(address, bytes a thread) of memory that this thread's waves may use; it is kept."""
        size = stride * torch.get_num_threads()
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._local.buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.data_ptr(), stride

    def _gate(self, layer: LayerExperts, step: Step, experts: Sequence[int]) -> None:
        """The module's own activation, expert by expert, as eager calls it."""
        dtype = layer.recipe.compute or layer.dtype
        start = len(step.routing.rows) * step.layer.width
        for expert in experts:
            rows = step.routing.entries(expert)
            at, count = rows.start, rows.stop - rows.start
            h = step.matrix(at * layer.width, count, layer.width)
            act = step.matrix(start + at * layer.inner, count, layer.inner)
            act.copy_(layer.gate(h.to(dtype)))

    def _norm(self, step: Step, norm: Callable[[Tensor], Tensor]) -> None:
        """Round, add the biases and apply the norm that follows each expert, in place."""
        layer, routing = step.layer, step.routing
        rows = torch.from_numpy(routing.rows)
        tokens, top_k = routing.shape
        out = step.matrix(step.out, tokens * top_k, layer.hidden)
        h = out[rows].to(layer.recipe.compute or layer.dtype)
        if layer.down_bias is not None:
            experts = torch.from_numpy(routing.experts)
            counts = torch.from_numpy(routing.starts).diff()
            h = h + layer.down_bias[experts.repeat_interleave(counts)].to(h.dtype)
        out[rows] = norm(h).float()


class Rounded(Fused):
    """`kernels="rounded"`: encoded weights are rounded to the model's type before they are used.

    So does transformers, which expands a checkpoint to that type; a layer has the bits of the
    default kernels on the checkpoint that it would save.
    """

    name = "rounded"
    rounded = True
