"""Layers of a few experts, and calls of the expert kernels in C++ for them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from greenroom.runtime.kernels.activation import RELU2
from greenroom.runtime.kernels.cpu_layer import SCRATCH_BYTES
from greenroom.runtime.kernels.launch.openmp import KernelEntry
from greenroom.runtime.kernels.matrix import Format
from greenroom.runtime.kernels.native.library import Library, library
from tests.runtime.kernels.packed import pack

CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TOP_K = 2
PADDING = -77.0  # of rows that are not computed
LIMIT = 4.0  # of gate and up projections, where an activation clamps them


def normals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@dataclass
class Routed:
    """The choices of tokens, sorted by expert: numbers as in the structure `Routing`."""

    experts: list[int]
    starts: list[int]
    tokens: list[int]
    rows: list[int]

    @classmethod
    def of(cls, choices: Sequence[Sequence[int | None]]) -> Routed:
        chosen = sorted(
            (expert, rank, token)
            for token, ranks in enumerate(choices)
            for rank, expert in enumerate(ranks)
            if expert is not None
        )
        experts = sorted({expert for expert, _, _ in chosen})
        starts = [sum(e < expert for e, _, _ in chosen) for expert in experts] + [len(chosen)]
        rows = [token * TOP_K + rank for _, rank, token in chosen]
        return cls(experts, starts, [token for _, _, token in chosen], rows)


class Layer:
    """Experts whose matrices lie in slots: up projections [outputs, inputs], then down ones.

    slots: the slot of each expert
    fields: others of the structure `ExpertLayer`
    """

    planes = 0  # of packed input rows

    def __init__(
        self, up: Tensor, down: Tensor, slots: Sequence[int] | None = None, code: int = RELU2,
        bias: Tensor | None = None, **fields: int,
    ) -> None:  # fmt: skip
        count, width, hidden = up.shape
        inner = down.shape[2]
        self.dtype, self.hidden, self.inner, self.width = up.dtype, hidden, inner, width
        self.slots, self.up = list(slots or range(count)), up
        if fields.get("transposed"):
            up, down = up.mT, down.mT
        each = torch.cat([up.flatten(1), down.flatten(1)], 1)
        self._memory = torch.full((max(self.slots) + 1, each.shape[1]), PADDING, dtype=self.dtype)
        self._memory[self.slots] = each
        self._bias = bias
        self.call = library().structure("ExpertLayer")(
            slots=self._memory.data_ptr(), slot_bytes=each[0].nbytes, hidden=hidden, inner=inner,
            width=width, bias=None if bias is None else bias.data_ptr(), **fields,
        )  # fmt: skip
        self.call.down.offset = up[0].nbytes
        self.call.activation.code, self.call.activation.limit = code, LIMIT


class Step:
    """Tokens' float32 memory, and calls of `compute_group` and `sum_experts` for it.

    narrow: x is passed in the layer's type, not in float32
    """

    def __init__(
        self, layer: Layer, x: Tensor, choices: Sequence[Sequence[int | None]],
        narrow: bool = False,
    ) -> None:  # fmt: skip
        self.layer, self.routed = layer, Routed.of(choices)
        self.x, self._narrow = x.to(layer.dtype if narrow else torch.float32), narrow
        entry_count = len(self.routed.rows)
        self.mid = torch.full((entry_count, layer.width), PADDING)
        self.act = torch.full((entry_count, layer.inner), PADDING)
        self.out = torch.full((len(x) * TOP_K, layer.hidden), PADDING)
        self._arrays = {name: torch.tensor(each) for name, each in vars(self.routed).items()}
        addresses = {name: each.data_ptr() for name, each in self._arrays.items()}
        self._packed = pack(self.x, layer.planes) if layer.planes else None
        self._routing = library().structure("Routing")(count=len(self.routed.experts), **addresses)

    def compute(
        self, enter: Callable[[int], None], experts: Sequence[int] | None = None,
        layer: Layer | None = None, threads: int = 1, **fields: int,
    ) -> None:  # fmt: skip
        """Compute some experts, by default all, of this layer or of a segment of it."""
        of = layer or self.layer
        experts = self.routed.experts if experts is None else experts
        lists = [torch.tensor(experts), torch.tensor([of.slots[e] for e in experts])]
        finished = torch.zeros(len(experts), dtype=torch.int64)
        size = SCRATCH_BYTES(library().address("expert_scratch_bytes"))(of.hidden, of.inner)
        scratch = torch.full((threads * size,), 0xFF, dtype=torch.uint8)
        call = library().structure("GroupCall")(
            layer=ctypes.addressof(of.call), routing=ctypes.addressof(self._routing),
            packed=None if self._packed is None else self._packed.data_ptr(),
            x=self.x.data_ptr(), mid=self.mid.data_ptr(), act=self.act.data_ptr(),
            out=self.out.data_ptr(), scratch=scratch.data_ptr(), scratch_bytes=size,
            count=len(experts), experts=lists[0].data_ptr(), slots=lists[1].data_ptr(),
            finished=finished.data_ptr(), narrow=self._narrow,
            pairs=self._narrow and self.x.dtype is torch.bfloat16,
            **{"up": 1, "down": 1, "sequential_rows": 4} | fields,
        )  # fmt: skip
        enter(ctypes.addressof(call))
        assert call.threads == threads

    def sum(self, enter: Callable[[int], None], weights: Tensor, **fields: int) -> Tensor:
        """Sum the experts' outputs, times gate weights [tokens, TOP_K], for each token."""
        tokens, hidden = len(self.x), self.layer.hidden
        sums = torch.empty(tokens, hidden)
        result = torch.empty(tokens, hidden, dtype=self.layer.dtype)
        call = library().structure("SumCall")(
            routing=ctypes.addressof(self._routing), tokens=tokens, hidden=hidden,
            outputs=self.out.data_ptr(), weights=weights.data_ptr(), sums=sums.data_ptr(),
            result=result.data_ptr(), **fields,
        )  # fmt: skip
        enter(ctypes.addressof(call))
        return result


def on_one_thread(entry: KernelEntry) -> Callable[[int], None]:
    return lambda call: entry(call, wide=False)


def on_threads(entry: KernelEntry, count: int) -> Callable[[int], None]:
    """Let several threads enter a call at the same time."""

    def enter(call: int) -> None:
        barrier = threading.Barrier(count)

        def run() -> None:
            barrier.wait()
            entry(call, wide=False)

        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return enter


class ObservedFormat:
    """The code of a format whose products call a function before and after themselves.

    The functions receive the addresses of the matrix's layout and of the slot.
    """

    def __init__(
        self, of: Library, name: str, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        self.code = Format.from_buffer_copy(Format.from_address(of.address(f"format_{name}")))
        rows_call, multiply = of.structure("RowsCall"), CODE(self.code.multiply)

        def observed(address: int) -> None:
            call = rows_call.from_address(address)
            place = call.layout, call.slot
            before(*place)
            multiply(address)
            after(*place)

        self._callback = CODE(observed)
        self.code.multiply = ctypes.cast(self._callback, ctypes.c_void_p).value


class EncodedLayer(Layer):
    """Experts with matrices of Q8_0 blocks, whose products are observed."""

    planes = 1

    def __init__(
        self, of: Library, hidden: int, inner: int, before: Callable[..., None] = lambda *_: None,
        after: Callable[..., None] = lambda *_: None,
    ) -> None:  # fmt: skip
        super().__init__(normals(3, inner, hidden).bfloat16(), normals(3, hidden, inner).bfloat16())
        sizes = {"up": (inner, hidden), "down": (hidden, inner)}
        self.format = ObservedFormat(of, "q8_0", before, after)
        blocks = {name: rows * inputs // 32 for name, (rows, inputs) in sizes.items()}
        draw = torch.Generator().manual_seed(0)
        slots = torch.randint(256, (3, sum(blocks.values()), 34), generator=draw, dtype=torch.uint8)
        scale = torch.tensor([2**-7], dtype=torch.float16)
        slots[:, :, :2] = scale.view(torch.uint8)
        self._memory, self.call.slots, self.call.slot_bytes = (
            slots,
            slots.data_ptr(),
            slots[0].nbytes,
        )
        self.layouts = {}
        for name, (_, inputs) in sizes.items():
            first = 0 if name == "up" else 34 * blocks["up"]
            self.layouts[name] = of.structure("Layout")(
                codes=first, row_bytes=34 * inputs // 32,
                rows_per_scale=1, groups_per_scale=1, rows_per_zero=1, rows_per_group=1,
            )  # fmt: skip
        for matrix, name in (("up", "up"), ("second", "up"), ("down", "down")):
            place = getattr(self.call, matrix)
            place.format = ctypes.addressof(self.format.code)
            place.layout = ctypes.addressof(self.layouts[name])
