"""C++ formats decode as the decoders do: every entry of a codebook."""

from __future__ import annotations

import pytest
import torch

from greenroom.runtime.encodings.ggml.codebook import DECODERS
from greenroom.runtime.kernels.native.library import library
from tests.runtime.kernels.codes import Style
from tests.runtime.kernels.widths.formats import EncodedMatrix, FormatCalls


@pytest.mark.parametrize("name", DECODERS)
def test_every_entry_of_a_codebook(name: str) -> None:
    """2,048 blocks of random codes have every entry, and every field of signs."""
    matrix, width = EncodedMatrix(Style(name), 32 * 256, rows=64), 32 * 256
    form = "native", torch.float32
    calls = FormatCalls(library(), matrix, matrix.symbol(*form), torch.zeros(1, width))
    assert torch.equal(calls.expand(), matrix.weights(*form))
