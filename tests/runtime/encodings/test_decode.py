"""Decoders give the values of each format's own reference, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from greenroom.core.layout import BLOCKS, SlotLayout
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.gguf_file import ggml_type
from greenroom.runtime import codebooks
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.encodings.ggml import codebook
from tests.ggml_blocks import GGML, HALVES, random_bytes, sane_scales, set_scales

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = [0.0, -0.0, 6e-8, -6.097e-5, 6.104e-5, 65504.0, np.inf, -np.inf, np.nan, 1.0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, where NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and bits(a) == bits(b)


def bits(x: torch.Tensor) -> bytes:
    return (
        x.nan_to_num(0, posinf=None, neginf=None).contiguous().view(torch.uint8).numpy().tobytes()
    )


def test_every_encoding_has_a_decoder():
    assert set(ENCODINGS) == set(BLOCKS)


def ggml(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[ggml_type(name)]


def test_the_page_on_formats_lists_the_ggml_types_that_are_tested_here() -> None:
    """Each has the tests of this file, and a model in tests/hf/checkpoint/test_ggml_types.py."""
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    (row,) = (line for line in page.splitlines() if "small letters" in line)
    assert set(row.split("|")[1].strip().split(", ")) == {ggml_type(name) for name in GGML}


def test_block_sizes_are_those_of_ggml() -> None:
    for name in GGML:
        assert BLOCKS[name] == gguf.GGML_QUANT_SIZES[ggml(name)]


def test_every_type_that_gguf_dequantises_is_served() -> None:
    """So a type that a new gguf adds is noticed here."""
    known = set()
    for kind, (_, nbytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except NotImplementedError:
            continue
        known.add(kind.name)
    assert known - {"F32", "F16", "BF16"} <= {ggml_type(name) for name in ENCODINGS}


@pytest.mark.parametrize("name", GGML)
def test_ggml_blocks_of_any_bytes(name: str) -> None:
    """All bytes are valid codes; there are enough of them for each entry of a codebook."""
    (block, _), rows = BLOCKS[name], 512
    random = np.random.default_rng(0)
    blocks = random_bytes(name, 2 * rows, random)
    sane_scales(name, blocks, random)
    codes = blocks.reshape(rows, -1)
    with np.errstate(over="ignore"):  # the largest scales of mxfp4
        expected = torch.from_numpy(gguf.dequantize(codes, ggml(name)))
    for dtype in DTYPES:
        got = ENCODINGS[name].decode([torch.from_numpy(codes)], (rows, 2 * block), dtype)
        assert same(got, expected.to(dtype))


@pytest.mark.parametrize("name", GGML)
def test_ggml_blocks_at_the_limits(name: str) -> None:
    """Scales that are zero, subnormal, the largest, infinite or NaN, under extreme codes."""
    random = np.random.default_rng(1)
    blocks = np.concatenate([np.zeros_like(b := random_bytes(name, 100, random)), b | 255, b])
    if name == "gguf_mxfp4":
        blocks[:256, 0] = np.arange(256)
    if name == "gguf_nvfp4":  # each scale with each code
        blocks[:256, :4] = np.arange(256)[:, None]
        blocks[:256, 4:] = np.tile(np.arange(16) * 17, 2)
    for turn, at in enumerate(HALVES[name]):  # every pair of limits where there are two
        set_scales(name, blocks, at, np.tile(np.repeat(LIMITS, 10) if turn else LIMITS * 10, 3))
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, ggml(name)))
    got = ENCODINGS[name].decode([torch.from_numpy(blocks)], expected.shape, torch.float32)
    assert same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_blocks_under_scales_of_matrices(dtype: torch.dtype) -> None:
    """Two matrices of two rows: llama.cpp multiplies the product with the scale."""
    random = np.random.default_rng(2)
    codes = random_bytes("gguf_nvfp4", 8, random).reshape(4, -1)
    scales = torch.tensor([[0.0003], [1.7]])
    values = torch.from_numpy(gguf.dequantize(codes, ggml("gguf_nvfp4")))
    expected = torch.cat([values[:2] * scales[0], values[2:] * scales[1]])
    parts = [torch.from_numpy(codes), scales]
    got = ENCODINGS["gguf_nvfp4_scaled"].decode(parts, (4, 128), dtype)
    assert same(got, expected.to(dtype))


def test_codebooks_need_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebooks, "find_spec", lambda name: None)
    codebooks.codebook.cache_clear()
    codebook.grid.cache_clear()
    with pytest.raises(UnsupportedModel, match="weights in IQ3_XXS need the package gguf"):
        ENCODINGS["iq3_xxs"].decode([torch.zeros(1, 98, dtype=torch.uint8)], (1, 256), DTYPES[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4(dtype: torch.dtype) -> None:
    """Every code under every scale but the one that stands for NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    blocks = codes.view(1, 255, 16, 16)
    # In float32, where every power of two is exact: torch 2.9 raises 2 in float16.
    expected = convert_moe_packed_tensors(blocks, scale[None], dtype=torch.float32)[0].T
    got = ENCODINGS["mxfp4"].decode([codes, scale], (255, 512), dtype)
    assert same(got, expected.to(dtype))


def e2m1_under_every_e4m3_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [256, 256] with all pairs of values in each row, and scales [256, 32], NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    return codes, scale.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("matrix_scale", [1.0, 0.0003, 7e-5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_where_the_matrix_scale_multiplies(dtype: torch.dtype, matrix_scale: float) -> None:
    """ModelOpt's `NVFP4QTensor.dequantize`, done again: the package is not among the tests' own.

    `e2m1_values[codes].view(groups of 16) * (scale.float() * weight_scale_2)`, then the dtype.
    """
    codes, scale = e2m1_under_every_e4m3_scale()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack((codes & 15, codes >> 4), -1).long()
    scales = scale.float() * torch.tensor(matrix_scale)
    expected = (values[pairs].view(256, 32, 16) * scales[..., None]).view(256, 512).to(dtype)
    parts = [codes, scale, torch.full((1, 1), matrix_scale)]
    got = ENCODINGS["nvfp4"].decode(parts, (256, 512), dtype)
    assert same(got + 0.0, expected + 0.0)  # its zeros are positive


@pytest.mark.parametrize("matrix_scale", [1.0, 3000.0, 17.3])
def test_nvfp4_where_the_matrix_scale_divides(matrix_scale: float) -> None:
    codes, scale = e2m1_under_every_e4m3_scale()
    weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    packer = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight_packed": codes, "weight_scale": scale}
    state["weight_global_scale"] = torch.tensor([matrix_scale])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = packer.decompress(state, scheme)["weight"]
    parts = [codes, scale, torch.full((1, 1), matrix_scale)]
    got = ENCODINGS["ct_nvfp4"].decode(parts, (256, 512), torch.bfloat16)
    assert same(got, expected)


@pytest.mark.parametrize("name", ["nvfp4", "ct_nvfp4"])
def test_a_matrix_of_two_has_two_matrix_scales(name: str) -> None:
    """Gate and up of an expert."""
    codes, scale = e2m1_under_every_e4m3_scale()
    decode, both = ENCODINGS[name].decode, torch.tensor([[0.5], [3.0]])
    got = decode([codes, scale, both], (256, 512), torch.bfloat16)
    for i, half in enumerate((slice(0, 128), slice(128, 256))):
        parts = [codes[half], scale[half], both[i : i + 1]]
        assert same(got[half], decode(parts, (128, 512), torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "blocks"), [((256, 384), (2, 3)), ((24, 128), (2, 1))])
def test_fp8(dtype: torch.dtype, shape: tuple[int, int], blocks: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(blocks)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, dtype)
    assert same(ENCODINGS["fp8"].decode([codes, scale], shape, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 128])
def test_compressed_tensors(dtype: torch.dtype, scales: torch.dtype, group: int) -> None:
    """Packed by the package's own compressor."""
    arguments = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    packer = BaseCompressor.get_value_from_registry("pack-quantized")
    w = torch.randn(48, 256).to(scales)
    scale = (w.view(48, -1, group).float().abs().amax(-1) / 7.5).to(scales)
    state = packer.compress({"weight": w, "weight_scale": scale}, scheme)
    expected = packer.decompress(dict(state), scheme)["weight"].to(dtype)
    parts = [state["weight_packed"], state["weight_scale"]]
    assert same(ENCODINGS["symmetric4"].decode(parts, (48, 256), dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_our_own(dtype: torch.dtype) -> None:
    """Element by element, as the definition says."""
    random = torch.Generator().manual_seed(0)
    for name, group, least in (("int8", 64, -128), ("int4", 32, -8)):
        values = torch.randint(least, -least, (3, 128), generator=random)
        scale = torch.randn(3, 128 // group, generator=random).half()
        expected = torch.empty(3, 128)
        for i in range(3):
            for j in range(128):
                expected[i, j] = scale[i, j // group].float() * values[i, j].float()
        codes = values.to(torch.int8)
        if name == "int4":
            codes = ((values[:, ::2] + 8) | (values[:, 1::2] + 8) << 4).to(torch.uint8)
        got = ENCODINGS[name].decode([codes, scale], (3, 128), dtype)
        assert same(got, expected.to(dtype)), name


def test_a_layout_names_the_parts_of_an_encoded_matrix():
    layout = SlotLayout.pack(
        [
            ("gate_up_proj", (96, 144), "uint8"),
            ("down_proj", (256, 32), "uint8"),
            ("down_proj.scale", (256, 2), "uint8"),
            ("other_proj", (8, 4), "bfloat16"),
        ],
        {"gate_up_proj": "q4_k", "down_proj": "mxfp4"},
        "bfloat16",
    )
    up, down, other = (layout.weight(n) for n in ("gate_up_proj", "down_proj", "other_proj"))
    assert (up.encoding, up.shape, up.dtype) == ("q4_k", (96, 256), "bfloat16")
    assert (down.encoding, down.shape) == ("mxfp4", (256, 64))
    assert [part.name for part in down.parts] == ["down_proj", "down_proj.scale"]
    assert (other.encoding, other.shape, other.dtype) == ("plain", (8, 4), "bfloat16")
    assert layout.nbytes == 96 * 144 + 256 * 32 + 256 * 2 + 64
