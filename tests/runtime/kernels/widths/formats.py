"""Every format at one width, on rows and memory that end where memory ends (walls.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.layout import BLOCKS, PLAIN, SlotLayout, WeightSpec
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.matrix import (
    PANEL,
    ROUNDED,
    Format,
    MatrixProduct,
    format_name,
    format_symbol,
    unsupported_reason,
)
from greenroom.runtime.kernels.native.library import Library
from tests.runtime.kernels.codes import AFFINE_STYLES, STYLES, Style, planes_of, tensors_of
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.packed import unpack
from tests.runtime.kernels.panels import PANELS, arranged
from tests.runtime.kernels.toys import DTYPES
from tests.runtime.kernels.walls import NAN, PAGE, moved, walled

# A tensor's two matrix scales belong to 23 rows each: no number of whole panels of 16 rows.
ROWS, MANY = 46, 70
# Rows of a call: fewer than a panel, whole panels, and a last one that overlaps another.
COUNTS = (1, 9, 16, 23, 40)
TOKENS = (1, 3, 4, 5, 8, 11)
# Widths in blocks: remainders of an iteration (4 blocks) and of a vector of scales (8, 16).
FEW = (1, 2, 3, 5, 9, 17)
ALL = range(1, MANY + 1)
CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
BYTES = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
WIDE = Style("int4", "float16", (1, 64))  # read as int4.wide
PLAINS = tuple(Style(PLAIN, str(dtype)[6:]) for dtype in DTYPES)
EVERY_STYLE = (*STYLES, *AFFINE_STYLES, WIDE, *PLAINS)


def unit_of(style: Style) -> int:
    """The inputs of a block of codes and scales."""
    across = style.share[1] if style.share[1] <= 128 else 1
    return max(32, across, 1 if style.name == PLAIN else BLOCKS[style.name][0])


class EncodedMatrix:
    """A matrix whose parts lie behind walls, with its decoded weights.

    in_panels: are its codes in the order of panels?
    """

    def __init__(
        self,
        style: Style,
        width: int,
        at_end: bool = True,
        rows: int = ROWS,
        in_panels: bool = False,
    ) -> None:
        random, shape = np.random.default_rng(width), (rows, width)
        if style.name == PLAIN:
            drawn = torch.from_numpy(random.standard_normal(shape))
            parts = {"w": drawn.to(getattr(torch, style.scales))}
        else:
            parts = tensors_of(style, "w", shape, random)
        self.spec = spec_of(style, parts)
        assert not unsupported_reason(self.spec), unsupported_reason(self.spec)
        self.style, self.shape, self.values = style, shape, list(parts.values())
        self.panel_rows = 0
        stored = self.values
        if in_panels:
            codes = torch.from_numpy(arranged(self.values[0].numpy(), style.name))
            self.panel_rows, stored = rows // PANEL * PANEL, [codes, *self.values[1:]]
        self.parts = [moved(part, at_end) for part in stored]

    def symbol(self, kernels: str, dtype: torch.dtype) -> str:
        """The name of the matrix's format for a model's type: `kernels` as in matrix.py."""
        name = format_name(self.spec)
        if self.style.name == PLAIN:
            return format_symbol(name, getattr(torch, self.style.scales))
        if kernels == "rounded" or name in ROUNDED:
            return format_symbol(name, dtype)
        same = planes_of(self.style) == planes_of(self.style, kernels)
        return format_symbol(name) if same else f"{format_symbol(name)}_{kernels}"

    def forms(self) -> dict[str, tuple[str, torch.dtype]]:
        """The names of all formats of the matrix, with the arguments of `symbol`."""
        every = [("native", torch.float32), ("precise", torch.float32)]
        every += [("rounded", dtype) for dtype in DTYPES]
        return {self.symbol(*each): each for each in reversed(every)}

    def weights(self, kernels: str, dtype: torch.dtype) -> Tensor:
        if self.style.name == PLAIN:
            return self.values[0].float()
        kind = dtype if kernels == "rounded" else torch.float32
        return ENCODINGS[self.style.name].decode(self.values, self.shape, kind).float()

    def layout(self, of: Library, first_input: int = 0) -> ctypes.Structure:
        """The description of the matrix from an input on, with addresses in place of offsets."""
        addresses = [
            part.data_ptr() + (part.nbytes // len(part) * first_input // self.shape[1])
            if part.shape[1] > 1
            else part.data_ptr()
            for part in self.parts
        ]
        layout = layout_of(of, self.spec, addresses)
        layout.panel_rows = self.panel_rows
        return layout


def layout_of(
    of: Library, spec: WeightSpec, addresses: Sequence[int], first: int = 0
) -> ctypes.Structure:
    """Describe a matrix whose parts have addresses, and whose first row has number `first`."""
    product = MatrixProduct(spec, torch.float32)
    layout = of.structure("Layout").from_address(product.arguments[1])
    layout = of.structure("Layout").from_buffer_copy(layout)
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


@lru_cache(maxsize=2)
def places(at_end: bool) -> list[NDArray[np.float32]]:
    """A page for each token's products."""
    return [walled(PAGE, at_end).view(np.float32) for _ in range(max(TOKENS))]


def packed_by(of: Library, x: Tensor, planes: int) -> Tensor:
    """Pack rows of float32 numbers by a library's kernel."""
    (rows, columns), out = x.shape, torch.empty_like(x)
    call = of.structure("PackCall")(
        planes=planes, rows=rows, columns=columns, x=x.data_ptr(), out=out.data_ptr()
    )
    CODE(of.address("pack_rows"))(ctypes.addressof(call))
    return out


class FormatCalls:
    """Calls of a format of a library, with input rows and results between walls."""

    def __init__(
        self, of: Library, matrix: EncodedMatrix, symbol: str, x: Tensor, at_end: bool = True
    ) -> None:
        self.of, self.matrix, self.at_end = of, matrix, at_end
        self.form = Format.from_address(of.address(symbol))
        self.inputs, self.planes = matrix.shape[1], int(self.form.planes)
        packed = packed_by(of, x, self.planes) if self.planes else x
        self.rows = [moved(row, at_end) for row in packed]
        self._scratch = walled(BYTES(of.address("rows_scratch_bytes"))(self.inputs), at_end)

    def _run(self, code: int, layout: ctypes.Structure, outs: list[int], **fields: Any) -> None:
        self._scratch[:] = NAN
        at, count = 4 * fields.pop("at", 0), len(outs)
        x = (ctypes.c_void_p * count)(*(row.data_ptr() + at for row in self.rows[:count]))
        out = (ctypes.c_void_p * count)(*outs)
        call = self.of.structure("RowsCall")(
            layout=ctypes.addressof(layout), next=layout.codes, tokens=count,
            scratch=self._scratch.ctypes.data, x=ctypes.addressof(x),
            out=ctypes.addressof(out), **fields,
        )  # fmt: skip
        CODE(code)(ctypes.addressof(call))

    def expand(self) -> Tensor:
        rows, width = self.matrix.shape
        flat = torch.from_numpy(walled(4 * rows * width, self.at_end)).view(torch.float32)
        layout = self.matrix.layout(self.of)
        self._run(self.form.expand, layout, [flat.data_ptr()], inputs=width, first=0, rows=rows)
        return flat.view(rows, width)

    def multiply(
        self, tokens: int, first: int, count: int, *, block: int = 0, start: float | None = None,
        cut: int = 0,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Products [tokens, count] with rows from number `first` on.

        start: what products are added to
        cut: the input up to which a call of its own multiplies
        """
        pages = places(self.at_end)[:tokens]
        outs = [page[-count:] if self.at_end else page[:count] for page in pages]
        for page, out in zip(pages, outs, strict=True):
            page.view(np.uint8)[:] = NAN
            if start is not None:
                out[:] = start
        addresses, carry = [out.ctypes.data for out in outs], start is not None
        for at, stop in ((0, cut), (cut, self.inputs)):
            if at < stop:
                layout = self.matrix.layout(self.of, at)
                self._run(
                    self.form.multiply, layout, addresses, inputs=stop - at, at=at, first=first,
                    rows=count, block=block or self.inputs, carry=carry,
                )  # fmt: skip
                carry = True
        for page in pages:
            margin = page[:-count] if self.at_end else page[count:]
            assert (margin.view(np.uint8) == NAN).all()
        return np.stack(outs)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def calls_of(planes: int) -> Iterator[tuple[int, int]]:
    """Numbers of tokens and of rows of calls."""
    yield from product(TOKENS, COUNTS) if planes else zip(TOKENS, (*COUNTS, 7), strict=True)


def results(
    of: Library, matrix: EncodedMatrix, symbol: str, at_end: bool
) -> Iterator[NDArray[np.float32]]:
    """Run all code of a format; what it has written, after a comparison with float64.

    A product has the same bits in all calls.
    """
    rows, width = matrix.shape
    kernels, dtype = matrix.forms()[symbol]
    x = torch.randn(max(TOKENS), width, generator=torch.Generator().manual_seed(width))
    calls, values = FormatCalls(of, matrix, symbol, x, at_end), matrix.weights(kernels, dtype)
    assert calls.planes == planes_of(matrix.style, kernels)
    flat = calls.expand()
    assert torch.equal(flat, values), "expanded"
    yield flat.numpy()
    inputs = torch.stack([unpack(row, calls.planes) for row in calls.rows])
    want = inputs @ values.double().T
    slack = 1e-5 * inputs.norm(dim=1, keepdim=True) * values.double().norm(dim=1)
    for block, start in product((width,) if calls.planes else (width, 64), (None, 0.5)):
        whole = calls.multiply(len(x), 0, rows, block=block, start=start)
        exact = want + (start or 0)
        assert bool(((torch.from_numpy(whole) - exact).abs() <= slack + 1e-6 * (start or 0)).all())
        yield whole
        for tokens, count in calls_of(calls.planes):
            first = 0 if start else rows - count
            got = calls.multiply(tokens, first, count, block=block, start=start)
            expected = whole[:tokens, first : first + count]
            assert same_bits(got, expected), (tokens, count, block, start)
            if calls.planes and not matrix.panel_rows:
                for cut in {unit_of(matrix.style), width - unit_of(matrix.style)} - {0, width}:
                    got = calls.multiply(tokens, first, count, start=start, cut=cut)
                    assert same_bits(got, expected), (tokens, count, cut, start)


def check_style(style: Style, blocks: int, at_end: bool = True) -> None:
    """Compare a format's code in all libraries with float64, and bit for bit.

    A matrix in panels, which no rounded product reads, has the bits of the same matrix in rows.
    """
    width = blocks * unit_of(style)
    matrix, matrices = EncodedMatrix(style, width, at_end), []
    if style.name in PANELS:
        matrices = [EncodedMatrix(style, width, at_end, in_panels=True)]
    for symbol in matrix.forms():
        rounded = symbol.endswith(tuple(str(dtype)[6:] for dtype in DTYPES))
        orders = [matrix] if rounded else [matrix, *matrices]
        for first, *others in zip(
            *(results(of, each, symbol, at_end) for of in LIBRARIES for each in orders),
            strict=True,
        ):
            assert all(same_bits(first, other) for other in others), (symbol, matrix.shape)
