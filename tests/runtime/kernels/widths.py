"""Every kernel at every width, on rows that end where memory ends (walls.py).

    python -m tests.runtime.kernels.widths [--all] [--only TEXT]

A process of its own, since a read beyond a row's end ends it: standard output ends with the case.
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose the instruction set.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from greenroom.core.layout import BLOCKS, SlotLayout
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.codegen.formats import encoded
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.dense import attention, stored
from greenroom.runtime.kernels.dense.accelerate import linear_forward, norm_forward
from greenroom.runtime.kernels.dense.attention import KeyValueView, OneTokenAttention
from greenroom.runtime.kernels.dense.stored import StoredMatrix
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.matrix import MatrixProduct, unsupported_reason
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.codes import STYLES, Coded, Style, tensors_of
from tests.runtime.kernels.dense.test_attention import FITTING, make
from tests.runtime.kernels.toys import DTYPES, compute, experts, inputs, layer_of
from tests.runtime.kernels.walls import WalledSlots, moved, nan_memory, walled

ROWS = COLUMNS + 1  # a whole tile and a row besides
TOKENS = (1, 2, 4, 5, 24)
MANY = 70
# Widths in blocks: each remainder of a turn (4 blocks) and of a vector of scales (8, 16) on either
# side of the first and the second vector, and those that gave NaN once.
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18, 19, 25, 31, 32, 33, 49)
EXPERTS = (1, 5, 8, 17, 33)  # of these in whole steps: their products have all widths
WIDE = Style("int4", "float16", (1, 64))  # read as int4.wide
Case = tuple[str, "Outcome"]


@dataclass
class Outcome:
    """Result and expectation of a case, and the largest distance allowed (0: the same bits)."""

    got: Tensor
    want: Tensor
    within: float = 0.0

    @property
    def problem(self) -> str:
        got, want = self.got.double(), self.want.double()
        if not got.isfinite().all():
            return f"{int((~got.isfinite()).sum())} of {got.numel()} are no numbers"
        distance = float((got - want).norm() / want.norm().clamp_min(1e-30))
        return f"a distance of {distance:.2g}" if distance > self.within else ""


def rows_of(
    style: Style, dtype: torch.dtype, rounded: bool, width: int, at_end: bool
) -> Iterator[Case]:
    """The compiled product of an encoding by itself: one row, a tile, both, and rows expanded."""
    parts = tensors_of(style, "w", (ROWS, width), np.random.default_rng(width))
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    spec = SlotLayout.pack(sizes, {"w": style.name}, str(dtype)[6:]).weight("w")
    if unsupported_reason(spec):
        return
    walls = [moved(part, at_end) for part in parts.values()]
    matrix = MatrixProduct(spec, dtype, rounded)
    layout = array("q", matrix._layout)
    places = encoded.L_CODES, encoded.L_SCALE, encoded.L_OTHER, encoded.L_INDEX
    for place, wall in zip(places, [*walls, *walls[-1:] * 3], strict=False):
        layout[place] = wall.data_ptr()
    frame = array("q", [0] * encoded.FRAME_ARGUMENTS)
    frame[encoded.F_LAYOUT], frame[encoded.F_INPUTS] = layout.buffer_info()[0], width
    enter = partial(matrix._product, frame.buffer_info()[0], False)

    def run(x: int, out: int, rows: int, first: int = 0, **arguments: int) -> None:
        spare = walled(5 * width + 320, at_end)
        frame[encoded.F_X], frame[encoded.F_OUT], frame[encoded.F_ROWS] = x, out, rows
        frame[encoded.F_FIRST], frame[encoded.F_SCRATCH] = first, spare.ctypes.data
        frame[encoded.F_BLOCK], frame[encoded.F_CARRY] = (
            arguments.get("block", width),
            arguments.get("carry", 0),
        )
        enter()

    kind = dtype if rounded and not matrix.packs_input else torch.float32
    values = ENCODINGS[style.name].decode(list(parts.values()), (ROWS, width), kind).float()
    how, side = "rounded" if rounded else "default", "end" if at_end else "start"
    name = f"rows {style} {how} {str(dtype)[6:]} {width} {side}"
    flat = torch.from_numpy(walled(4 * ROWS * width, at_end)).view(torch.float32)
    run(0, flat.data_ptr(), ROWS)
    yield f"{name} expanded", Outcome(flat.view(ROWS, width), values, 1e-6)
    x = moved(torch.randn(width, generator=torch.Generator().manual_seed(width)), at_end)
    address, room = x.data_ptr(), layout[encoded.L_PACKED]
    packed = walled(room, at_end)
    if room:
        run(address, packed.ctypes.data, 0)
        address = packed.ctypes.data
    within = 1e-3 if room else 1e-5
    for block in (width, 64):
        out = moved(torch.full((ROWS,), float("nan")), at_end)
        run(address, out.data_ptr(), ROWS, block=block)
        yield f"{name} block {block}", Outcome(out.clone(), values @ x, within)
        one = moved(torch.full((1,), float("nan")), at_end)
        run(address, one.data_ptr(), 1, first=ROWS - 1, block=block)
        yield f"{name} block {block} last row", Outcome(one, out[-1:].clone())
        run(address, out.data_ptr(), ROWS, block=block, carry=1)
        yield f"{name} block {block} carried", Outcome(out, 2 * (values @ x), within)


class _Nan:
    """A kernel whose memory holds NaN at every call."""

    def scratch(self, stride: int) -> tuple[int, int]:
        self._memory = torch.from_numpy(walled(stride * torch.get_num_threads()))
        return self._memory.data_ptr(), stride


class NanFused(_Nan, CpuKernel):
    pass


def of_experts(
    style: Style, hidden: int, inner: int, tokens: Sequence[int] = TOKENS
) -> Iterator[Case]:
    """A step of an MoE layer with encoded experts, by both kernels."""
    module = experts("qwen3_moe", torch.bfloat16, hidden, inner)
    for key in ("down_proj", "gate_up_proj"):  # its shape alone is of use
        setattr(module, key, nn.Parameter(getattr(module, key), requires_grad=False))
    case = Coded(module, style, style, slots=WalledSlots)
    if case.layer.fallback_reason:
        return
    for count in tokens:
        x, index, weights = inputs(torch.bfloat16, count, hidden=hidden, seed=count)
        x = moved(x)
        want = compute(NanFused(True, True), case.plain, case.places, x, index, weights)
        for kernel in (NanFused(True), NanFused(True, True)):
            got = compute(kernel, case.layer, case.places, x, index, weights)
            packs = any(m.packs_input for m in layer_plan(case.layer, kernel.rounded).matrices)
            near = 0.0 if kernel.rounded and not packs else 2e-2
            name = f"experts {style} {type(kernel).__name__[3:]} {hidden} x {inner}, {count} tokens"
            yield name, Outcome(got, want, near)


def of_plain_experts(family: str, dtype: torch.dtype, hidden: int, inner: int) -> Iterator[Case]:
    """A step of an MoE layer with plain experts."""
    module = experts(family, dtype, hidden, inner)
    layer, places = layer_of(module, slots=WalledSlots)
    for count in TOKENS:
        x, index, weights = inputs(dtype, count, hidden=hidden, seed=count)
        x = moved(x)
        want = compute(EagerKernel(), layer, places, x, index, weights)
        got = compute(NanFused(True), layer, places, x, index, weights)
        yield (
            f"{family} {str(dtype)[6:]} {hidden} x {inner}, {count} tokens",
            Outcome(got, want, 2e-2),
        )


def of_linear(dtype: torch.dtype, width: int, outputs: int) -> Iterator[Case]:
    """A dense layer and a router's products, plain."""
    layer = nn.Linear(width, outputs, dtype=dtype).requires_grad_(False)
    layer.weight = nn.Parameter(moved(layer.weight.data), requires_grad=False)
    layer.bias = nn.Parameter(moved(layer.bias.data), requires_grad=False)
    forward = linear_forward(layer)
    for count in (1, 2, 4, 5, 16):
        x = moved(torch.randn(count, width).to(dtype))
        want = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        name = f"{str(dtype)[6:]} {outputs} x {width}, {count} tokens"
        yield f"linear {name}", Outcome(forward(x), want, 2e-2)
        out = torch.from_numpy(walled(4 * count * outputs)).view(torch.float32)
        wide = moved(x.float())
        record = stored.MatrixRecord(layer.weight)
        call = library().structure("LinearCall")(
            matrix=record.address, outputs=outputs, inputs=width, rows=count
        )
        call.wide, call.sums = wide.data_ptr(), out.data_ptr()
        kernel_entry("linear", dtype)(addressof(call), False)
        yield f"scores {name}", Outcome(out.view(count, outputs), want - layer.bias.double(), 1e-3)


def of_stored(style: Style, width: int, outputs: int = 70) -> Iterator[Case]:
    """A dense layer whose matrix is stored, and its rows expanded."""
    parts = tensors_of(style, "weight", (outputs, width), np.random.default_rng(width))
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    matrix = StoredMatrix(
        SlotLayout.pack(sizes, {"weight": style.name}, "bfloat16"), torch.bfloat16
    )
    if matrix.unsupported_reason:
        return

    def fill(nbytes: int, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(walled(nbytes))

    for place, part in zip(matrix.allocate(fill), parts.values(), strict=True):
        place.view(torch.uint8).copy_(part.view(torch.uint8))
    layer, values = nn.Linear(width, outputs, bias=False), matrix.decode()
    layer.register_parameter("weight", None)
    for rounded in (False, True):
        forward = linear_forward(layer, matrix, rounded)
        for count in (1, 2, 4, 5, 16):
            _forget()
            x = moved(torch.randn(count, width).bfloat16())
            name = f"stored {style} {'rounded' if rounded else 'default'} {width}, {count} tokens"
            yield name, Outcome(forward(x), x.double() @ values.double().T, 2e-2)
    _forget()
    yield f"rows of stored {style} {width}", Outcome(matrix.look_up(torch.arange(outputs)), values)


def _forget() -> None:
    """Overwrite the memory that one product leaves, so that the next cannot use it."""
    memory = getattr(stored._local, "memory", None)
    if memory is not None:
        memory.fill_(0xFF)


def of_norm(dtype: torch.dtype, width: int) -> Iterator[Case]:
    """An RMSNorm of some rows."""
    norm = nn.RMSNorm(width, dtype=dtype)
    norm.weight = nn.Parameter(moved(torch.randn(width).to(dtype)), requires_grad=False)
    forward = norm_forward(norm, 0, 1e-6)
    x = moved(torch.randn(3, width).to(dtype))
    want = nn.functional.rms_norm(x.double(), (width,), norm.weight.double(), 1e-6)
    yield f"norm {str(dtype)[6:]} {width}", Outcome(forward(x), want, 2e-2)


def of_attention(one: OneTokenAttention, tokens: int) -> Iterator[Case]:
    """A token's attention over keys and values that end at a wall."""
    shape = (1, one.kv_heads, tokens, one.width)
    keys, values = (moved(torch.randn(shape).to(one.dtype)) for _ in range(2))
    before = [part[:, :, :-1].clone() for part in (keys, values)]
    x = moved(torch.randn(1, 1, one.hidden).to(one.dtype))
    positions = tuple(moved(torch.randn(1, 1, one.width).to(one.dtype)) for _ in range(2))
    one._reserve = lambda cache, layer: KeyValueView(keys, values, tokens)
    cache = attention._TrialCache(*before)
    want = one.original(one.module, x, positions, None, cache)[0]
    yield (
        f"attention {str(one.dtype)[6:]} {tokens} tokens",
        Outcome(one(x, positions, None), want, 2e-2),
    )


def of_style(style: Style, all_widths: bool) -> Iterator[Case]:
    """All cases of one encoding."""
    unit = {"int8": 64}.get(style.name, max(32, BLOCKS[style.name][0]))
    blocks = range(1, MANY + 1) if all_widths else FEW
    tokens = TOKENS if all_widths else (1, 5)
    for count in blocks:
        for dtype in (torch.bfloat16, torch.float16) if all_widths else (torch.bfloat16,):
            for rounded in (False, True):
                for at_end in (True, False) if all_widths else (True,):
                    yield from rows_of(style, dtype, rounded, count * unit, at_end)
    many = blocks if all_widths else EXPERTS
    for count in many if unit < 256 else range(1, 9 if all_widths else 3):
        # The other width is one that leaves its turn unfinished too, or all but its first vector.
        for other in (3, 31) if all_widths and count in FEW and unit < 256 else (3,):
            yield from of_experts(style, count * unit, other * unit, tokens)
            yield from of_experts(style, other * unit, count * unit, tokens)
        if all_widths:
            yield from of_stored(style, count * unit)


def of_plain(dtype: torch.dtype, all_widths: bool) -> Iterator[Case]:
    """All cases of plain weights of one type."""
    elements = (
        range(1, 2 * MANY + 1) if all_widths else (1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 90)
    )
    for count in elements:
        for family in ("qwen3_moe", "aria") if all_widths else ("qwen3_moe",):
            yield from of_plain_experts(family, dtype, count, 19)
            yield from of_plain_experts(family, dtype, 19, count)
        if dtype is not torch.float32:
            for outputs in (1, 4, 7, 65) if all_widths else (7,):
                yield from of_linear(dtype, count, outputs)
            yield from of_norm(dtype, count)
    if all_widths and dtype is not torch.float32:
        module = make(*FITTING["mixtral"], dtype)
        one = OneTokenAttention(module, None, lambda cache, layer: None, {})
        for tokens in elements:
            yield from of_attention(one, tokens)


def cases(all_widths: bool) -> Iterator[Case]:
    """All cases, or the cases of a few widths."""
    for style in (*(replace(s, share=(1, s.share[1])) for s in STYLES), WIDE):
        yield from of_style(style, all_widths)
    for dtype in DTYPES if all_widths else (torch.bfloat16,):
        yield from of_plain(dtype, all_widths)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.empty = nan_memory
    number = wrong = 0
    kinds = Counter[str]()
    with torch.no_grad():
        for name, outcome in cases(args.all):
            if args.only in name:
                number += 1
                kinds[" ".join(name.split()[:2])] += 1
                if problem := outcome.problem:
                    wrong += 1
                    print(f"{name}: {problem}", flush=True)
    print(*(f"{count:6} {kind}" for kind, count in kinds.items()), sep="\n")
    print(f"{number} cases, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
