"""Rotary tables have the bits of single positions; unsupported modules get no tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import MellumConfig, Qwen3MoeConfig
from transformers.models.mellum.modeling_mellum import MellumRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from greenroom.runtime.kernels.dense.rotary import ROWS, TABLES, RotaryTables


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def rotary(width: int = 64, **rope: object) -> Qwen3MoeRotaryEmbedding:
    rope_options = {"rope_theta": 1e6, "rope_type": "default", **rope}
    config = Qwen3MoeConfig(
        head_dim=width, max_position_embeddings=8192, rope_parameters=rope_options
    )
    return Qwen3MoeRotaryEmbedding(config)


def equal(module: torch.nn.Module, ours: RotaryTables, x: torch.Tensor, ids: torch.Tensor) -> bool:
    expected = type(module).forward(module, x, ids)
    result = ours.forward(x, position_ids=ids)
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(result, expected, strict=True)
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}, YARN], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_looked_up_positions_have_the_bits_of_the_module(rope, dtype):
    module = rotary(**rope)
    ours = RotaryTables.of(module, {dtype})
    assert ours is not None
    x = torch.zeros(1, 1, 8, dtype=dtype)
    positions = torch.randint(0, 8000, (200,), generator=torch.Generator().manual_seed(0))
    for position in [*positions.tolist(), *range(ROWS - 2, ROWS + 2)]:
        assert equal(module, ours, x, torch.tensor([[position]]))
    assert len(ours._tables) == TABLES  # older tables are dropped


def test_the_module_computes_calls_that_tables_do_not_support(monkeypatch):
    module = rotary()
    ours = RotaryTables.of(module, {torch.bfloat16})
    x = torch.zeros(1, 1, 8).bfloat16()
    assert equal(module, ours, x, torch.arange(5)[None])
    calls = []
    monkeypatch.setattr(ours, "_original", lambda *_, **__: calls.append(True))
    one = torch.tensor([[3]])
    ours.forward(x, one)
    assert not calls
    ours.forward(x, torch.tensor([[3], [4]]))
    ours.forward(x, one, layer_type="full")
    ours.forward(x.float(), one)
    with torch.enable_grad():
        ours.forward(x, one)
    assert len(calls) == 4
    module.attention_scaling = 2.0
    ours.forward(x, one)
    module.inv_freq = module.inv_freq * 2
    ours.forward(x, one)
    assert len(calls) == 6


class Odd(Qwen3MoeRotaryEmbedding):
    """A rotary embedding whose result for one position differs from that among others."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return cos + (position_ids.numel() == 1), sin


def test_unsupported_rotary_modules_get_no_tables():
    dynamic = rotary(rope_type="dynamic", factor=2.0)
    assert RotaryTables.of(dynamic, {torch.bfloat16}) is None
    odd = rotary()
    odd.__class__ = Odd
    assert RotaryTables.of(odd, {torch.bfloat16}) is None
    assert RotaryTables.of(torch.nn.Linear(4, 4), {torch.bfloat16}) is None
    odd.__class__ = torch.nn.Identity  # it returns one tensor, not two
    assert RotaryTables.of(odd, {torch.bfloat16}) is None


def test_a_rope_type_per_layer_type_gets_no_tables():
    module = MellumRotaryEmbedding(MellumConfig())
    assert isinstance(module.rope_type, dict)
    assert RotaryTables.of(module, {torch.bfloat16}) is None


def test_threads_can_add_tables_at_the_same_time():
    module = rotary()
    ours = RotaryTables.of(module, {torch.bfloat16})
    x = torch.zeros(1, 1, 8).bfloat16()

    def look_up(seed: int) -> bool:
        starts = torch.randperm(60, generator=torch.Generator().manual_seed(seed)) * ROWS
        with torch.no_grad():
            return all(equal(module, ours, x, start.view(1, 1)) for start in starts)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look_up, range(4)))
    assert len(ours._tables) == TABLES


def test_tables_made_in_inference_mode_can_be_used_outside():
    module = rotary()
    ours = RotaryTables.of(module, {torch.bfloat16})
    x, ids = torch.zeros(1, 1, 8).bfloat16(), torch.tensor([[900]])
    with torch.inference_mode():
        ours.forward(x, ids)
    cos, _ = ours.forward(x, ids)
    assert not cos.is_inference()
