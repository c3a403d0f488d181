"""Dense layers with stored matrices have the bits of the same layers expanded."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from greenroom.core.layout import SlotLayout
from greenroom.hf.kv.single_token import append_token
from greenroom.runtime.kernels.dense import accelerate as accelerated
from greenroom.runtime.kernels.dense.accelerate import FEW, accelerate
from greenroom.runtime.kernels.dense.stored import (
    StoredMatrix,
    attach_matrix,
    expanded_bytes,
    restore_weights,
    stored_matrix,
)
from greenroom.runtime.kernels.matrix import is_exact
from tests.runtime.kernels.codes import STYLES, Style, tensors_of
from tests.runtime.kernels.dense.test_attention import SHAPE, distance, inputs, make

BY_NAME = {str(style): style for style in STYLES}
ROWS, COLUMNS = 384, 512


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def matrix(
    style: Style, shape: tuple[int, int] = (ROWS, COLUMNS), dtype: torch.dtype = torch.bfloat16
) -> StoredMatrix:
    parts = tensors_of(style, "weight", shape, np.random.default_rng(0))
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    stored = StoredMatrix(SlotLayout.pack(sizes, {"weight": style.name}, str(dtype)[6:]), dtype)
    for place, part in zip(stored.allocate(), parts.values(), strict=True):
        place.view(torch.uint8).copy_(part.view(torch.uint8))
    return stored


def pair(stored: StoredMatrix, bias: bool = True) -> nn.ModuleList:
    """A linear layer with a stored matrix, and one with the same matrix expanded."""
    rows, columns = stored.shape
    one = nn.Linear(columns, rows, bias=bias, dtype=stored.dtype).requires_grad_(False)
    other = copy.deepcopy(one)
    other.weight = nn.Parameter(stored.decode(), requires_grad=False)
    attach_matrix(one, stored)
    return nn.ModuleList([one, other])


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_an_encoded_layer_has_the_bits_of_the_expanded_layer(style: Style) -> None:
    model = pair(matrix(style))
    stored, expanded = model
    done = accelerate(model, kernels="rounded")
    assert done.counts == {"linear": 2}
    for rows in (1, 2, 4, FEW, FEW + 1, 40):
        x = torch.randn(rows, COLUMNS).bfloat16()
        if rows <= FEW and is_exact(matrix(style).spec, torch.bfloat16):  # by whole numbers
            assert distance(stored(x), expanded(x)) < 1e-3
        else:
            assert torch.equal(stored(x), expanded(x)), rows
    done.detach()
    assert torch.equal(stored.weight, expanded.weight)
    assert stored_matrix(stored) is None
    assert torch.equal(stored(x), expanded(x))


@pytest.mark.parametrize("name", ["q8_0", "q6_k", "int4-float16"])
def test_bits_are_equal_in_float16_and_with_any_number_of_threads(name: str) -> None:
    model = pair(matrix(BY_NAME[name], dtype=torch.float16), bias=False)
    accelerate(model, kernels="rounded")
    x = torch.randn(1, COLUMNS).half()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(model[0](x), model[1](x))


@pytest.mark.parametrize(
    "name", ["q8_0", "q4_k", "iq4_xs", "int4-float16", "gguf_mxfp4", "gguf_nvfp4"]
)
def test_unrounded_weights_are_nearer_to_the_values_of_the_format(name: str) -> None:
    stored = matrix(BY_NAME[name])
    wide = StoredMatrix(stored.layout, torch.float32)
    for place, part in zip(wide.allocate(), stored.parts, strict=True):
        place.copy_(part)
    model = pair(stored, bias=False)
    accelerate(model, kernels="precise")
    x = torch.randn(1, COLUMNS).bfloat16()
    expected = x.double() @ wide.decode().double().T
    assert distance(model[0](x), expected) <= 1.001 * distance(model[1](x), expected)
    assert distance(model[0](x), expected) < torch.finfo(torch.bfloat16).eps


def test_an_embedding_looks_up_rows_of_an_encoded_matrix() -> None:
    stored = matrix(BY_NAME["q4_k"])
    module = nn.Embedding(ROWS, COLUMNS, dtype=torch.bfloat16).requires_grad_(False)
    attach_matrix(module, stored)
    assert accelerate(module, kernels="rounded").counts == {"embedding": 1}
    ids = torch.randint(0, ROWS, (2, 7))
    assert torch.equal(module(ids), stored.decode()[ids])
    assert module(ids[:, :0]).shape == (2, 0, COLUMNS)
    assert module(ids.to("meta")).shape == (2, 7, COLUMNS)
    for wrong in (-1, ROWS):
        with pytest.raises(IndexError):
            module(torch.tensor([[wrong]]))


def test_modules_that_share_a_matrix_share_a_parameter_again() -> None:
    stored = matrix(BY_NAME["q8_0"])
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(ROWS, COLUMNS), "head": nn.Linear(COLUMNS, ROWS, bias=False)}
    ).bfloat16()
    for module in model.values():
        attach_matrix(module, stored)
    assert list(model.parameters()) == []
    restore_weights(model)
    assert model["head"].weight is model["embedding"].weight
    assert torch.equal(model["head"].weight, stored.decode())


def test_many_tokens_are_multiplied_with_some_rows_at_a_time(monkeypatch) -> None:
    model = pair(matrix(BY_NAME["q8_0"]))
    assert expanded_bytes(model) == ROWS * COLUMNS * 2
    accelerate(model, kernels="rounded")
    x = torch.randn(3, FEW, COLUMNS).bfloat16()
    expected = model[1](x)
    monkeypatch.setattr(accelerated, "EXPANDED", 100 * COLUMNS * 2)
    requests: list[tuple[int, int]] = []
    rows = StoredMatrix.rows

    def counted(stored: StoredMatrix, first: int, count: int) -> torch.Tensor:
        requests.append((first, count))
        return rows(stored, first, count)

    monkeypatch.setattr(StoredMatrix, "rows", counted)
    assert distance(model[0](x), expected) < torch.finfo(torch.bfloat16).eps
    assert requests == [(0, 100), (100, 100), (200, 100), (300, 84)]


def test_torch_computes_inputs_that_the_kernel_does_not_support() -> None:
    model = pair(matrix(BY_NAME["q8_0"]), bias=False)
    stored, expanded = model
    accelerate(model, kernels="rounded")
    odd = torch.randn(COLUMNS, 2).bfloat16().T
    assert torch.equal(stored(odd), expanded(odd))
    with pytest.raises(RuntimeError):
        stored(torch.randn(1, COLUMNS))
    with pytest.raises(RuntimeError):
        stored(torch.randn(1, 64).bfloat16())
    assert stored(torch.empty(1, COLUMNS, device="meta")).shape == (1, ROWS)
    with torch.enable_grad():
        x = torch.randn(1, COLUMNS).bfloat16().requires_grad_()
        assert stored(x).grad_fn is not None
    other = nn.Parameter(torch.randn(ROWS, COLUMNS).bfloat16(), requires_grad=False)
    stored.weight = other
    assert torch.equal(stored(odd), nn.functional.linear(odd, other))


@pytest.mark.parametrize(
    ("style", "shape", "dtype", "why"),
    [
        (BY_NAME["q8_0"], (64, 64), torch.float32, "float32"),
        (Style("symmetric4", "float16", (1, 48)), (96, 96), torch.bfloat16, "1 x 48"),
        (BY_NAME["fp8-float32"], (64, 40), torch.bfloat16, "40 inputs"),
    ],
)
def test_the_reason_names_what_no_product_supports(style, shape, dtype, why) -> None:
    assert why in matrix(style, shape, dtype).unsupported_reason


# Attention


def attention(styles: dict[str, str]) -> tuple[Any, Any]:
    """An attention with encoded projections, and the same attention expanded."""
    config = Qwen3MoeConfig(**SHAPE | {"hidden_size": 256}, head_dim=64)
    one = make(Qwen3MoeAttention, config)
    other = copy.deepcopy(one)
    for name, style in styles.items():
        stored = matrix(BY_NAME[style], tuple(getattr(one, name).weight.shape))
        attach_matrix(getattr(one, name), stored)
        getattr(other, name).weight = nn.Parameter(stored.decode(), requires_grad=False)
    return one, other


@pytest.mark.parametrize(
    "styles",
    [
        dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "q8_0"),
        {"q_proj": "q4_0", "k_proj": "q4_0", "v_proj": "q8_0"},  # o_proj is plain
        {"k_proj": "q4_0", "o_proj": "q8_0"},
    ],
    ids=["alike", "plain output", "plain queries and values"],
)
def test_attention_has_the_bits_of_the_expanded_one(styles: dict[str, str]) -> None:
    one, other = attention(styles)
    for module in (one, other):
        assert accelerate(module, append_token, kernels="rounded").counts["attention"] == 1
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for tokens in (1, 40):
            x, positions, cache = inputs(other, tokens, torch.bfloat16)
            mine = one(x, positions, None, copy.deepcopy(cache))[0]
            assert torch.equal(mine, other(x, positions, None, copy.deepcopy(cache))[0])


def test_attention_with_unrounded_weights_is_near() -> None:
    one, other = attention({"q_proj": "q4_0", "k_proj": "q4_k", "v_proj": "q6_k", "o_proj": "q4_0"})
    accelerate(one, append_token)
    accelerate(other, append_token, kernels="rounded")
    x, positions, cache = inputs(other, 30, torch.bfloat16)
    mine = one(x, positions, None, copy.deepcopy(cache))[0]
    expected = other(x, positions, None, copy.deepcopy(cache))[0]
    assert 0 < distance(mine, expected) < 0.02


@pytest.mark.parametrize("rows", [384, 39, 7])
def test_an_arranged_matrix_has_the_bits_of_the_same_in_rows(rows: int) -> None:
    style = BY_NAME["q6_k"]
    plain, moved = matrix(style, (rows, COLUMNS)), matrix(style, (rows, COLUMNS))
    before = plain.parts[0].clone()
    moved.arrange()
    moved.arrange()  # a second time, nothing
    assert moved.spec.parts[0].panels == "q6_k"
    assert torch.equal(moved.parts[0], before)
    assert torch.equal(moved.decode(), plain.decode())
    assert torch.equal(moved.rows(3, 4), plain.rows(3, 4))
    ids = torch.tensor([[rows - 1, 0, 5]])
    assert torch.equal(moved.look_up(ids), plain.look_up(ids))
    x = torch.randn(3, COLUMNS).bfloat16()
    products = []
    for each in (plain, moved):
        linear = nn.Linear(COLUMNS, rows, bias=False, dtype=each.dtype).requires_grad_(False)
        attach_matrix(linear, each)
        products.append(accelerated.linear_forward(linear, each)(x))
    assert torch.equal(*products)


def test_what_has_no_panels_stays_as_it_is() -> None:
    stored = matrix(BY_NAME["int4-float16"])
    before = stored.parts[0].clone()
    stored.arrange()
    assert stored.spec.parts[0].panels == ""
    assert torch.equal(stored.parts[0], before)
