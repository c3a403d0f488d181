"""The program for one token, interpreted: sums of all encodings, against their decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from greenroom.core.layout import BLOCKS, WeightSpec
from greenroom.runtime.encodings import decode
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import TritonKernel, chunks, one_token, programs
from greenroom.runtime.kernels.triton.plan import TritonMatrix, plan_of
from tests.runtime.kernels.codes import STYLES, Coded, Style
from tests.runtime.kernels.toys import EXPERTS, compute, experts, inputs
from tests.runtime.kernels.triton.test_kernel import distance

pytestmark = pytest.mark.interpreted
BF16, FP16 = torch.bfloat16, torch.float16
SIGNED = Style("symmetric8", "bfloat16", (1, 64), "int8")
SMALL_BLOCKS = Style("fp8", "float32", (32, 128))  # a program's rows have several scales
COVERED = [*(style for style in STYLES if style.name in chunks.CHUNKS), SIGNED]
FEW = (1, 2, 5, 17)  # blocks in a row
ALL = range(1, 71)  # as the CPU's kernels are checked with
WIDE = one_token.WIDTH + 1  # chunks: one more than are loaded at a time


def unit(style: Style) -> int:
    """Inputs of the smallest matrix that the program reads."""
    pair = (
        2 if style.name in ("mxfp4", "gguf_mxfp4", *chunks.ZEROS) else 1
    )  # bytes are loaded in pairs
    share = style.share[1] if style.share[1] < 1 << 20 else 1
    return max(BLOCKS[style.name][0], share, chunks.CHUNKS[style.name]) * pair


def layer_of(
    style: Style, blocks: int, dtype: torch.dtype = BF16, family: str = "qwen3_moe"
) -> Any:
    """Experts with as many small blocks in a row of gate and up, and one in a row of down."""
    module = experts(family, dtype, hidden=unit(style) * blocks, inner=unit(style))
    return Coded(module, style, style, fields=True)


def sums(layer: LayerExperts, slot: int, weight: WeightSpec, x: torch.Tensor) -> torch.Tensor:
    """The sums of a matrix's rows times x [1, inputs], as the program leaves those of a segment."""
    routing = Routing.of(np.array([[0]]), EXPERTS)
    step = TritonKernel().begin(layer, x, routing, torch.ones(1, 1, dtype=layer.dtype))
    outputs, columns = weight.shape
    out = torch.full((1, outputs), float("nan"))
    tiles = torch.tensor([plan_of(layer).offset(layer, slot), 0, 0, 1])
    matrix = TritonMatrix.of(layer, weight)
    assert step.one
    assert matrix.group
    step.projection(tiles, matrix, None, out, columns, outputs, segment=1).start(x)
    step.projection(tiles, matrix, None, out, columns, outputs, segment=2).start(x)
    return out[0].double() / 2


def block_counts(style: Style) -> set[int]:
    """Some small blocks, and so many that a row has more than the chunks that are loaded."""
    few = {n for n in FEW if n * unit(style) <= 576}
    return few | {-(-WIDE * chunks.CHUNKS[style.name] // unit(style))}


CASES = [(style, n) for style in (*COVERED, SMALL_BLOCKS) for n in sorted(block_counts(style))]


def check_sums(layer: LayerExperts, slot: int, weight: WeightSpec, dtype: torch.dtype) -> None:
    parts = [layer.slots.tensor(slot, part) for part in weight.parts]
    if weight.encoding in chunks.AFFINE:  # the program does not round to the scales' type
        parts[1] = parts[1].float()
    values = decode(weight, parts, torch.float32).double()
    x = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    got, exact = sums(layer, slot, weight, x), values @ x[0].double()
    # A scale may be 0, and so may a row.
    size = (values.abs() @ x[0].double().abs()).clamp_min(1e-30)
    assert float(((got - exact).abs() / size).max()) < 2e-6


@pytest.mark.parametrize(("style", "blocks"), CASES, ids=str)
def test_sums_are_those_of_the_values_in_float32(style, blocks):
    for dtype in (BF16, FP16) if blocks == 1 else (BF16,):
        coded = layer_of(style, blocks, dtype)
        for weight in (coded.layer.up_weight, coded.layer.down_weight):
            check_sums(coded.layer, coded.places[1], weight, dtype)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", [*COVERED, SMALL_BLOCKS], ids=str)
def test_sums_of_every_width_are_those_of_the_values(style, monkeypatch):
    if BLOCKS[style.name][0] == 256:  # one program: the interpreter is as slow for few rows
        monkeypatch.setattr(one_token, "ROWS_OF", {style.name: 512})
    for blocks in ALL:
        coded = layer_of(style, blocks)
        check_sums(coded.layer, coded.places[1], coded.layer.up_weight, BF16)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("style", COVERED, ids=str)
def test_a_token_is_near_to_eager(style, family, monkeypatch):
    """With gate and up one after the other and in turns, with biases and without.

    Eager rounds weights to bfloat16, which the program does not.
    """
    coded = layer_of(style, 1, family=family)
    monkeypatch.setattr(programs, "project", None)
    case = inputs(BF16, 1, hidden=coded.layer.hidden)
    got = compute(TritonKernel(), coded.layer, coded.places, *case)
    want = compute(EagerKernel(), coded.layer, coded.places, *case)
    assert got.any()
    assert distance(got, want) < 2 * torch.finfo(BF16).eps


@pytest.mark.parametrize("tokens", [1, 2])
def test_codes_of_fp8_that_are_no_numbers_are_nan_as_in_eager(tokens):
    """In both programs: for one token, and for several."""
    style = next(style for style in COVERED if style.name == "fp8")
    coded = layer_of(style, 2)
    down = coded.layer.down
    for expert, slot in enumerate(coded.places):
        codes = coded.layer.slots.tensor(slot, down).view(torch.uint8)
        numbers = torch.randint(
            0, 256, codes.shape, generator=torch.Generator().manual_seed(expert)
        )
        near = (numbers & 0x7F).clamp(0, 0x7E) | (numbers & 0x80)  # 0x7E and 0xFE are numbers
        codes.copy_(near.to(torch.uint8))
        codes[expert::7, expert::11] = 0x7F if expert % 2 else 0xFF
    case = inputs(BF16, tokens, top_k=1, hidden=coded.layer.hidden)
    for expert in (2, 3):
        case[1][:] = expert
        got = compute(TritonKernel(), coded.layer, coded.places, *case)
        want = compute(EagerKernel(), coded.layer, coded.places, *case)
        assert torch.equal(got.isnan(), want.isnan())
        assert 0 < got.isnan().sum() < got.numel()
        assert distance(got[~got.isnan()], want[~want.isnan()]) < 2 * torch.finfo(BF16).eps


def test_matrices_that_it_cannot_read_are_left_to_the_other_program():
    coded = Coded(
        experts("qwen3_moe", BF16, hidden=96, inner=96),
        Style("mxfp4", "uint8"),
        Style("mxfp4", "uint8"),
    )
    assert TritonMatrix.of(coded.layer, coded.layer.up_weight).group == 0
    case = inputs(BF16, 1, hidden=96)
    got = compute(TritonKernel(), coded.layer, coded.places, *case)
    assert distance(got, compute(EagerKernel(), coded.layer, coded.places, *case)) < 2e-3
