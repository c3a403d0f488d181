"""Kernels compiled for aarch64 give the bits of those for AVX2: `make portable`.

The library is in build/aarch64, and runs in an emulator.
"""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.core.layout import BLOCKS, SlotLayout, WeightSpec
from greenroom.runtime.kernels.matrix import (
    GROUP,
    MatrixProduct,
    format_name,
    format_symbol,
    unsupported_reason,
)
from greenroom.runtime.kernels.native.library import FOLDER, Library
from tests.runtime.kernels.codes import STYLES, Style, tensors_of
from tests.runtime.kernels.native.emulator import Emulated

NEON = Path(__file__).parents[4] / "build/aarch64/lib/greenroom-neon.so"
pytestmark = [
    pytest.mark.portable,
    pytest.mark.skipif(not NEON.exists(), reason="`make portable` compiles it"),
]
# Rows of a call: fewer than a panel of 16, and a last panel that overlaps another.
ROWS, BLOCKS_OF_ROW, DTYPES = (6, 22), 3, (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (1, 3, 5)


class Here:
    """The library of this processor, with the emulator's methods."""

    def __init__(self) -> None:
        self.library = Library(FOLDER / "greenroom-avx2.so")
        self.address, self._held = self.library.address, []

    def place(self, data: bytes) -> int:
        self._held.append(ctypes.create_string_buffer(data, len(data) + 64))
        return ctypes.addressof(self._held[-1])

    def take(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def call(self, address: int, argument: int) -> int:
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(argument)


Machine = Here | Emulated
HERE = Here()


@pytest.fixture(scope="module")
def neon() -> Emulated:
    return Emulated(NEON)


def matrix_of(style: Style) -> tuple[WeightSpec, bytes]:
    """The layout and the bytes of a matrix of any codes and sane scales."""
    inputs = BLOCKS[style.name][0]
    share = style.share[1] if style.share[1] < 1 << 20 else 64
    width = -(-BLOCKS_OF_ROW * max(inputs, share) // GROUP) * GROUP
    random = np.random.default_rng(0)
    parts = tensors_of(style, "w", (max(*ROWS, 2 * style.share[0]), width), random)
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    layout = SlotLayout.pack(sizes, {"w": style.name}, "bfloat16")
    slot = bytearray(layout.nbytes)
    for spec in layout.tensors:
        data = parts[spec.name].contiguous().view(torch.uint8).numpy().tobytes()
        slot[spec.offset : spec.offset + len(data)] = data
    return layout.weight("w"), bytes(slot)


def results(machine: Machine, spec: WeightSpec, slot: bytes, symbol: str) -> list[bytes]:
    """What all functions of a matrix's format write, products last."""
    width, most = spec.shape[1], max(TOKENS)
    product = MatrixProduct(spec, torch.float32)
    planes, multiply, expand = struct.unpack("3Q", machine.take(machine.address(symbol), 24))
    random = np.random.default_rng(1)
    x = random.standard_normal((most, width)).astype(np.float32).tobytes()
    row, rows = 4 * width, max(ROWS)
    inputs = machine.place(x + bytes(256))
    values = {
        "slot": machine.place(slot), "layout": machine.place(bytes(product._layout)),
        "inputs": width, "scratch": machine.place(bytes(4 * (5 * width + 320))),
    }  # fmt: skip
    values["next"] = values["slot"]
    found = [planes.to_bytes(8, "little")]

    def run(function: int, structure: str, result: int, nbytes: int, **fields: int) -> None:
        call = HERE.library.structure(structure)(**fields)
        machine.call(function, machine.place(bytes(call)))
        found.append(machine.take(result, nbytes))

    def addresses(first: int, step: int, count: int) -> int:
        return machine.place(struct.pack(f"{count}Q", *range(first, first + step * count, step)))

    out = machine.place(bytes(rows * row))
    run(
        expand, "RowsCall", out, rows * row, **values, rows=rows, tokens=1, out=addresses(out, 1, 1)
    )
    if planes:
        pack, fields = machine.address("pack_rows"), {"rows": most, "columns": width}
        run(pack, "PackCall", inputs, most * row, planes=planes, x=inputs, out=inputs, **fields)
    for count in ROWS:
        start = np.ones(count * most, np.float32).tobytes()
        for tokens, block, carry in ((1, width, 0), (3, 64, 1), (most, width, 1)):
            out = machine.place(start)
            run(
                multiply, "RowsCall", out, 4 * count * tokens, **values, rows=count,
                tokens=tokens, block=block, carry=carry, x=addresses(inputs, row, tokens),
                out=addresses(out, 4 * count, tokens),
            )  # fmt: skip
    return found


def cases() -> list[object]:
    """All formats of the library that tests have codes for."""
    names = {style: format_name(matrix_of(style)[0]) for style in STYLES}
    return [
        pytest.param(style, symbol, id=f"{style}-{symbol}")
        for style, name in names.items()
        for symbol in (
            format_symbol(name),
            f"{format_symbol(name)}_precise",
            *(format_symbol(name, dtype) for dtype in DTYPES),
        )
        if HERE.address(symbol)
    ]


def test_the_structures_of_arguments_are_the_same(neon):
    names = set(re.findall(rb"\0fields_of_(\w+)", NEON.read_bytes()))
    assert names
    for name in map(bytes.decode, names):
        size = HERE.library.address(f"bytes_of_{name}")
        assert neon.take(neon.address(f"bytes_of_{name}"), 8) == HERE.take(size, 8), name


@pytest.mark.parametrize(("style", "symbol"), cases())
def test_a_format_gives_the_same_bits(neon, style, symbol):
    spec, slot = matrix_of(style)
    assert not unsupported_reason(spec)
    got, want = (results(machine, spec, slot, symbol) for machine in (neon, HERE))
    assert got == want
    products = np.frombuffer(want[-1], np.float32)
    assert np.isfinite(products).all()
    assert len(set(products.tolist())) > max(ROWS)
