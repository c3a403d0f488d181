"""C++ formats decode as the decoders do: every affine variant, every entry of a codebook."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from greenroom.core.layout import SlotLayout
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.encodings.ggml.codebook import DECODERS
from greenroom.runtime.kernels.matrix import Format, MatrixProduct, format_name, format_symbol
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.codes import AFFINE_STYLES, Style, tensors_of
from tests.runtime.kernels.toys import DTYPES

CODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def check(style: Style, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Compare decoded weights, rounded to a type, with those of the decoder."""
    parts = tensors_of(style, "w", shape, np.random.default_rng(0))
    sizes = [(name, tuple(part.shape), str(part.dtype)[6:]) for name, part in parts.items()]
    layout = SlotLayout.pack(sizes, {"w": style.name}, "bfloat16")
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, part in parts.items():
        place = slice(layout[name].offset, layout[name].offset + layout[name].nbytes)
        slot[place] = part.contiguous().view(torch.uint8).flatten()
    weight, (rows, columns) = layout.weight("w"), shape
    symbol = format_symbol(format_name(weight), dtype)
    product, got = MatrixProduct(weight, dtype), torch.empty(shape)
    scratch = torch.empty(9 * columns, dtype=torch.uint8)
    call = library().structure("RowsCall")(
        slot=slot.data_ptr(), layout=product.arguments[1], inputs=columns, rows=rows,
        out=got.data_ptr(), scratch=scratch.data_ptr(),
    )  # fmt: skip
    CODE(Format.from_address(library().address(symbol)).expand)(ctypes.addressof(call))
    want = ENCODINGS[style.name].decode(list(parts.values()), shape, dtype).float()
    assert torch.equal(got, want)


@pytest.mark.parametrize("style", AFFINE_STYLES, ids=str)
def test_every_affine_variant(style: Style) -> None:
    for dtype in DTYPES:
        check(style, (6, 768), dtype)


@pytest.mark.parametrize("name", DECODERS)
def test_every_entry_of_a_codebook(name: str) -> None:
    """2,048 blocks of random codes have every entry, and every field of signs."""
    check(Style(name), (64, 32 * 256), torch.float32)
