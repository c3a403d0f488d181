"""Every format at one width, on rows and memory that end where memory ends (walls.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from greenroom.core.layout import BLOCKS, PLAIN, SlotLayout, WeightSpec
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.matrix import (
    PACKED_BYTES,
    Format,
    MatrixProduct,
    format_name,
    format_symbol,
    unsupported_reason,
)
from greenroom.runtime.kernels.native.library import Library
from tests.runtime.kernels.codes import AFFINE_STYLES, STYLES, Style, tensors_of
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.toys import DTYPES
from tests.runtime.kernels.walls import moved, walled

ROWS, MANY = 10, 70
# Widths in blocks: remainders of an iteration (4 blocks) and of a vector of scales (8, 16).
FEW = (1, 2, 3, 5, 9, 17)
ALL = range(1, MANY + 1)
CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TYPES = (None, *DTYPES)  # to which weights are decoded; None: they are multiplied as they are
WIDE = Style("int4", "float16", (1, 64))  # read as int4.wide
PLAINS = tuple(Style(PLAIN, str(dtype)[6:]) for dtype in DTYPES)
EVERY_STYLE = (*STYLES, *AFFINE_STYLES, WIDE, *PLAINS)


def unit_of(style: Style) -> int:
    """The inputs of a block of codes and scales."""
    across = style.share[1] if style.share[1] <= 128 else 1
    return max(32, across, 1 if style.name == PLAIN else BLOCKS[style.name][0])


class EncodedMatrix:
    """A matrix whose parts lie behind walls, with its decoded weights."""

    def __init__(self, style: Style, width: int, at_end: bool = True, rows: int = ROWS) -> None:
        random, shape = np.random.default_rng(width), (rows, width)
        if style.name == PLAIN:
            drawn = torch.from_numpy(random.standard_normal(shape))
            parts = {"w": drawn.to(getattr(torch, style.scales))}
        else:
            parts = tensors_of(style, "w", shape, random)
        self.spec = spec_of(style, parts)
        assert not unsupported_reason(self.spec), unsupported_reason(self.spec)
        self.style, self.shape, self.values = style, shape, list(parts.values())
        self.parts = [moved(part, at_end) for part in self.values]

    def symbol(self, dtype: torch.dtype | None) -> str:
        return format_symbol(format_name(self.spec), dtype)

    def types(self) -> list[torch.dtype | None]:
        """The types of weights for which there is code."""
        if self.style.name == PLAIN:
            return [getattr(torch, self.style.scales)]
        return list(TYPES)

    def weights(self, dtype: torch.dtype | None) -> Tensor:
        if self.style.name == PLAIN:
            return self.values[0].float()
        kind = dtype or torch.float32
        return ENCODINGS[self.style.name].decode(self.values, self.shape, kind).float()

    def layout(self, of: Library, packed: int) -> ctypes.Structure:
        """The description of the matrix, with addresses in place of offsets."""
        return layout_of(of, self.spec, packed, [part.data_ptr() for part in self.parts])


def layout_of(
    of: Library, spec: WeightSpec, packed: int, addresses: Sequence[int], first: int = 0
) -> ctypes.Structure:
    """Describe a matrix whose parts have addresses, and whose first row has number `first`."""
    product = MatrixProduct(spec, torch.float32)
    layout = of.structure("Layout").from_address(product.arguments[1])
    layout = of.structure("Layout").from_buffer_copy(layout)
    layout.packed_bytes = packed
    layout.scales = layout.zeros = layout.groups = addresses[0]
    for field, address in zip(("codes", "scales", "zeros", "groups"), addresses, strict=False):
        setattr(layout, field, address)
    layout.codes -= first * layout.row_bytes
    return layout


def spec_of(style: Style, parts: dict[str, Tensor]) -> WeightSpec:
    """Describe a matrix `w` that consists of some tensors."""
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    encodings = {} if style.name == PLAIN else {"w": style.name}
    return SlotLayout.pack(sizes, encodings, "bfloat16").weight("w")


def near(got: Tensor, want: Tensor, within: float) -> bool:
    return bool((got.double() - want).norm() <= within * want.norm())


def results(
    of: Library, matrix: EncodedMatrix, dtype: torch.dtype | None, at_end: bool
) -> Iterator[bytes]:
    """Run all code of a format; what it has written, after a comparison with float64."""
    rows, width = matrix.shape
    form = Format.from_address(of.address(matrix.symbol(dtype)))
    room, values = PACKED_BYTES(form.packed_bytes)(width), matrix.weights(dtype)
    layout = matrix.layout(of, room)
    draw = torch.Generator().manual_seed(width)
    x = moved(torch.randn(width, generator=draw), at_end)
    want = values.double() @ x.double()
    need = PACKED_BYTES(of.address("rows_scratch_bytes"))(width)
    packed, scratch = walled(room, at_end), walled(need, at_end)
    call = of.structure("RowsCall")(
        layout=ctypes.addressof(layout), inputs=width, x=x.data_ptr(), next=layout.codes,
        scratch=scratch.ctypes.data, block=width,
    )  # fmt: skip

    def run(code: int, out: int, count: int) -> None:
        scratch[:] = 0xFF
        call.out, call.first, call.rows = out, rows - count, count
        CODE(code)(ctypes.addressof(call))

    flat = torch.from_numpy(walled(4 * rows * width, at_end)).view(torch.float32)
    run(form.expand, flat.data_ptr(), rows)
    assert near(flat.view(rows, width), values.double(), 1e-6), "expanded"
    yield flat.numpy().tobytes()
    assert bool(room) == bool(form.pack)
    if form.pack:
        run(form.pack, packed.ctypes.data, 0)
        yield packed.tobytes()
        call.x = packed.ctypes.data
    place = torch.from_numpy(walled(4 * (rows - 1), at_end)).view(torch.float32)
    for count in range(1, rows):
        out = place[-count:] if at_end else place[:count]
        for call.block in (width, 64):
            for call.carry in (0, 1):
                run(form.multiply, out.data_ptr(), count)
                case = f"{count} rows, block {call.block}, carry {call.carry}"
                factor = 1 + call.carry
                expected = factor * want[rows - count :]
                scale = values[rows - count :].double().norm() * x.double().norm()
                distance = (out.double() - expected).norm()
                assert distance <= (1e-3 if room else 1e-5) * scale, case
                yield out.numpy().tobytes()


def check_style(style: Style, blocks: int, at_end: bool = True) -> None:
    """Compare a format's code in all libraries with float64, and bit for bit."""
    matrix = EncodedMatrix(style, blocks * unit_of(style), at_end)
    for dtype in matrix.types():
        first, *others = (list(results(of, matrix, dtype, at_end)) for of in LIBRARIES)
        assert all(first == other for other in others), (style, matrix.shape, dtype)
