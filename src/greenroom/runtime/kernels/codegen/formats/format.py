"""Description of an encoding for kernels: how to decode its weights, and how to multiply them."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.runtime.kernels.codegen.formats.codes import IntegerProduct
from greenroom.runtime.kernels.codegen.formats.expand import Expander


@dataclass(frozen=True, slots=True)
class Format:
    """The LLVM code for one encoding.

    expander: decodes weights to float32
    integers: multiplies weights with integer inputs; None: there is no such code
    """

    expander: Expander
    integers: IntegerProduct | None = None
