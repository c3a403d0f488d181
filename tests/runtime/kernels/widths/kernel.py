"""A kernel of a library, memory for its calls, and comparisons of its results."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from greenroom.runtime.kernels.matrix import Format
from greenroom.runtime.kernels.native.library import Library
from tests.runtime.kernels.codes import Style, planes_of
from tests.runtime.kernels.packed import rounded
from tests.runtime.kernels.walls import NAN, WalledMemory, bytes_of
from tests.runtime.kernels.widths.formats import BYTES, CODE, EncodedMatrix

ALIGNMENT = 63  # bytes that kernels may skip for memory at a multiple of 64


class WalledKernel(WalledMemory):
    """A kernel of a library, which the calling thread enters with arrays between walls."""

    def __init__(self, of: Library, name: str, dtype: torch.dtype | None, at_end: bool) -> None:
        super().__init__(at_end)
        self.of, self.dtype = of, dtype or torch.float32
        self.symbol = symbol_of(name, dtype)
        self._entry = CODE(of.address(self.symbol))
        self._seed = 0

    def structure(self, name: str, **fields: Any) -> Any:
        return self.of.structure(name)(**fields)

    def call(self, name: str, **fields: Any) -> Any:
        """Run the kernel with a structure of arguments, and return the structure."""
        arguments = self.structure(name, **fields)
        self.enter(arguments)
        return arguments

    def enter(self, arguments: Any) -> None:
        self._entry(ctypes.addressof(arguments))

    def call_of_tokens(self, calls: list[Any], wide: int = 0, out: int = 0) -> None:
        """Run the kernel for several tokens, with a call of the kernel for one token for each."""
        addresses = (ctypes.c_int64 * len(calls))(*map(ctypes.addressof, calls))
        self.call(
            "TokensCall", tokens=len(calls), wide=wide, out=out, calls=self.place(addresses)
        )  # fmt: skip

    def scratch(self, nbytes: int) -> int:
        return self.allocate(nbytes, dtype=torch.uint8).data_ptr()

    def integers(self, *shape: int, most: int = 2) -> Tensor:
        """Draw small integers of the model's type: sums of their products are exact."""
        self._seed += 1
        random = torch.Generator().manual_seed(self._seed)
        return torch.randint(-most, most + 1, shape, generator=random).to(self.dtype)

    def normals(self, *shape: int) -> Tensor:
        """Draw normally distributed numbers of the model's type."""
        self._seed += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self._seed)).to(
            self.dtype
        )

    def place_call(self, name: str, **fields: Any) -> Any:
        """Make a structure that the kernel changes, between walls."""
        nbytes = ctypes.sizeof(self.of.structure(name))
        memory = self.allocate(nbytes, dtype=torch.uint8)
        call = self.of.structure(name).from_buffer(memory.numpy())
        ctypes.memmove(ctypes.addressof(call), bytes(self.structure(name, **fields)), nbytes)
        return call

    def place_structures(self, structures: list[Any]) -> int:
        return self.place((type(structures[0]) * len(structures))(*structures))

    def plain_matrix(self, weight: Tensor) -> int:
        return self.place_structures([self.structure("Matrix", base=self.place(weight))])


class PlacedMatrix:
    """An encoded matrix between walls, as kernels of a library take it.

    kernels: native, precise or rounded
    in_panels: are its codes in the order of panels?
    scratch: bytes of memory for a product with one row
    error:   bound of a product's error, for a row and inputs of length 1
    """

    error = 1e-5

    def __init__(
        self,
        kernel: WalledKernel,
        style: Style,
        shape: tuple[int, int],
        kernels: str = "native",
        in_panels: bool = False,
    ) -> None:
        rows, inputs = shape
        matrix = _encoded(style, inputs, kernel.at_end, rows, in_panels)
        symbol = matrix.symbol(kernels, kernel.dtype)
        self.scratch = ALIGNMENT + BYTES(kernel.of.address("rows_scratch_bytes"))(inputs)
        self.weights = matrix.weights(kernels, kernel.dtype)
        self._planes = planes_of(style, kernels)
        form = kernel.of.address(symbol)
        assert Format.from_address(form).planes == self._planes
        layout = kernel.place_structures([matrix.layout(kernel.of)])
        self.address = kernel.place_structures(
            [kernel.structure("Matrix", format=form, layout=layout)]
        )

    def inputs(self, x: Tensor) -> Tensor:
        """The inputs that are multiplied in place of x, in float64."""
        return rounded(x, self._planes)

    def slack(self, x: Tensor) -> Tensor:
        """How far products [.., rows] with inputs x [.., inputs] may be from float64's."""
        lengths = x.double().norm(dim=-1, keepdim=True) * self.weights.double().norm(dim=-1)
        return self.error * lengths


_encoded = lru_cache(maxsize=2)(EncodedMatrix)


def symbol_of(name: str, dtype: torch.dtype | None) -> str:
    return f"{name}_{str(dtype)[6:]}" if dtype else name


def is_near(got: Tensor, want: Tensor, relative: float, absolute: Tensor | float = 0.0) -> bool:
    """Are all numbers near, and none of them NaN?"""
    return bool(((got.double() - want.double()).abs() <= relative * want.abs() + absolute).all())


def is_untouched(memory: Tensor) -> bool:
    return bool((bytes_of(memory) == NAN).all())
