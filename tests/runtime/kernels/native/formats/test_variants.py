"""Every format has the same bits in the libraries for all processors that run here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from greenroom.core.layout import WeightSpec
from greenroom.runtime.kernels.matrix import Format, MatrixProduct, format_name, format_symbol
from greenroom.runtime.kernels.native.library import FOLDER, VARIANTS, Library, library
from tests.runtime.kernels.codes import AFFINE_STYLES, STYLES, Coded, Style
from tests.runtime.kernels.native.formats.test_encoded import sizes
from tests.runtime.kernels.toys import experts

ALL_STYLES = (*STYLES, *AFFINE_STYLES, Style("int4", "float16", (1, 64)))
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # to which weights are decoded
ROWS = 7  # four at once, and three one by one
CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PACKED_BYTES = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
SYMBOLS = {name for name in library().symbols() if name.startswith("format_")}
COMPILED = sorted(
    name for name in SYMBOLS if {f"{name}_{str(dtype)[6:]}" for dtype in TYPES} <= SYMBOLS
)


def coded(style: Style) -> Coded:
    return Coded(experts("qwen3_moe", torch.bfloat16, *sizes(style)), style, style)


def memory(nbytes: int) -> np.ndarray:
    """Bytes of NaN at an address that is a multiple of 64."""
    place = np.full(nbytes + 64, 0xFF, np.uint8)
    return place[-place.ctypes.data % 64 :][:nbytes]


def results(
    of: Library, weight: WeightSpec, slot: int, dtype: torch.dtype | None
) -> Iterator[np.ndarray]:
    """The packed inputs, products and decoded weights of a matrix, as bytes."""
    form = Format.from_address(of.address(format_symbol(format_name(weight), dtype)))
    product = MatrixProduct(weight, torch.bfloat16)
    columns = weight.shape[1]
    random = np.random.default_rng(0)
    x = (random.normal(size=columns) * np.exp(random.normal(size=columns))).astype(np.float32)
    need = PACKED_BYTES(of.address("rows_scratch_bytes"))(columns)
    scratch, packed = memory(need), memory(PACKED_BYTES(form.packed_bytes)(columns))
    call = of.structure("RowsCall")(
        slot=slot, layout=product.arguments[1], inputs=columns, x=x.ctypes.data, next=slot,
        scratch=scratch.ctypes.data, out=packed.ctypes.data,
    )  # fmt: skip
    if form.pack:
        CODE(form.pack)(ctypes.addressof(call))
        call.x = packed.ctypes.data
        yield packed
    for rows, code in ((ROWS, form.multiply), (ROWS * columns, form.expand)):
        for call.block, call.carry in ((columns, 0), (64, 1)):
            out = memory(4 * rows)
            out.view(np.float32)[:] = 0.1
            call.rows, call.out = ROWS, out.ctypes.data
            CODE(code)(ctypes.addressof(call))
            assert np.isfinite(out.view(np.float32)).all()
            assert np.unique(out.view(np.float32)).size > 1
            yield out


@pytest.mark.parametrize("name", COMPILED)
def test_products_have_the_same_bits_in_every_library(name: str) -> None:
    """The packed inputs, products and decoded weights; with every style that has the format."""
    paths = [FOLDER / f"greenroom-{variant}.so" for variant in VARIANTS]
    others = [
        other
        for other in (Library(path) for path in paths if path.exists())
        if other.runs_here and other.variant != library().variant
    ]
    if not others:
        pytest.skip("this processor runs one of the libraries only")
    cases = [
        (case, weight)
        for case in (coded(s) for s in ALL_STYLES if name.startswith(f"format_{s.name}"))
        for weight in (case.layer.up_weight, case.layer.down_weight)
        if format_symbol(format_name(weight)) == name
    ]
    assert cases, "no test has this format"
    for case, weight in cases:
        slot = case.layer.slots.tensor(case.places[0], weight.parts[0]).data_ptr()
        for dtype in (None, *TYPES):
            for other in others:
                pairs = zip(
                    results(library(), weight, slot - weight.parts[0].offset, dtype),
                    results(other, weight, slot - weight.parts[0].offset, dtype),
                    strict=True,
                )
                assert all(np.array_equal(*pair) for pair in pairs), (weight.encoding, dtype)
