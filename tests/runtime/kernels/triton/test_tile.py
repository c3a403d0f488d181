"""Tiles that are decoded from chunks, interpreted: the bits of the expanded weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from greenroom.runtime.kernels.triton import TritonKernel, chunks, kernel
from tests.runtime.kernels.codes import Style
from tests.runtime.kernels.toys import compute, inputs
from tests.runtime.kernels.triton.test_one_token import ALL, COVERED, FEW, layer_of, unit

pytestmark = pytest.mark.interpreted
BF16, FP16 = torch.bfloat16, torch.float16


# Five small blocks end within a tile; of large ones, two fill several tiles.
CASES = [(style, n) for style in COVERED for n in FEW if n * unit(style) <= 576]


def set_tile(style: Style, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the least width of a tile that an encoding has."""
    entries, outputs, width, warps = kernel.MANY
    least = chunks.LEAST.get(style.name, 0)
    if least > width:  # sums have the order of the inputs of a tile
        tile = entries, outputs * width // least, least, warps
        monkeypatch.setattr(kernel, "MANY", tile)


def check_bits(
    style: Style, blocks: int, dtype: torch.dtype, tokens: int, experts: tuple[int, ...] = (4, 1)
) -> None:
    coded = layer_of(style, blocks, dtype)
    case = inputs(dtype, tokens, top_k=len(experts), hidden=coded.layer.hidden)
    case[1][:] = torch.tensor(experts)  # few entries of an expert, and many
    got = compute(TritonKernel(), coded.layer, coded.places, *case)
    assert got.isfinite().all()
    assert got.any()
    assert torch.equal(got, compute(TritonKernel(), coded.plain, coded.places, *case))


@pytest.mark.parametrize(("style", "blocks"), CASES, ids=str)
def test_tiles_of_any_width_have_the_bits_of_expanded_weights(
    style: Style, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last chunk ends within a tile, and rows end within a program's."""
    set_tile(style, monkeypatch)
    for dtype in (BF16, FP16) if blocks == 1 else (BF16,):
        for tokens in (2, 20) if blocks == 1 else (2,):
            check_bits(style, blocks, dtype, tokens)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", COVERED, ids=str)
def test_tiles_of_every_width_have_the_bits_of_expanded_weights(
    style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, _, width, warps = kernel.FEW
    # Few programs: the interpreter is as slow for few outputs.
    monkeypatch.setattr(kernel, "FEW", (entries, 256, width, warps))
    for blocks in ALL:
        check_bits(style, blocks, BF16, 2, experts=(4,))
