"""`torch.compile` leaves experts and compiled kernels as they are: same bits, no endless trace."""

from __future__ import annotations

import pytest
import torch

import greenroom
from tests.models import cached_tiny

IDS = torch.randint(5, 90, (1, 7), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(forward) -> torch.Tensor:
    """Of a prompt and of the token that follows it."""
    out = forward(IDS, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    more = forward(token, past_key_values=out.past_key_values, use_cache=True)
    return torch.cat([out.logits, more.logits], 1)


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch.compiler.reset()


@pytest.mark.process
@pytest.mark.timeout(300)  # on a busy machine; a trace into the scheduler takes for ever
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen2_moe", "native"),  # shared experts are computed while others are awaited
        pytest.param("qwen3_moe", "native", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_has_the_bits_of_the_model(name: str, kernels: str) -> None:
    folder = str(cached_tiny(name, dtype="bfloat16", tokenizer=True))
    model, _ = greenroom.load(folder, cache="30%", kernels=kernels)
    expected, before = logits(model), model.greenroom.stats().expert_requests
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled), expected)
    assert model.greenroom.stats().expert_requests == 2 * before
    assert torch.equal(logits(model), expected)
    model.greenroom.detach()


def test_a_model_with_experts_has_no_single_graph() -> None:
    folder = str(cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True))
    model, _ = greenroom.load(folder, cache="30%", kernels="eager")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Greenroom loads and computes experts outside of compiled"):
        logits(compiled)
    model.greenroom.detach()
