"""Identity experts of LongCat Flash: one token's, and those of several tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from greenroom.hf.adapters.longcat_flash import _forward
from tests.recorded_graphs import name_of, waits

EXPERTS, HIDDEN, TOP_K = 8, 16, 6


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert not waits(function), name_of(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("identities", [0, 1, 3])
def test_a_token_has_the_bits_of_several_and_waits_for_nothing(identities):
    """A graph cannot bring the choice to the host."""
    generator = torch.Generator().manual_seed(identities)
    x, total = (torch.randn(1, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    weights = torch.rand(1, TOP_K, generator=generator)
    ids = [*range(EXPERTS + identities - 1, EXPERTS - 1, -1), *range(TOP_K - identities)]
    index = torch.tensor([ids])

    def block(tokens: int) -> Any:
        def experts(*_: Any) -> torch.Tensor:
            return total.repeat(tokens, 1)

        experts.num_experts = EXPERTS  # type: ignore[attr-defined]
        choice = None, weights.repeat(tokens, 1), index.repeat(tokens, 1)
        return SimpleNamespace(router=lambda _: choice, experts=experts)

    expected = _forward(block(2), x.repeat(2, 1))
    with NoWaiting():
        got = _forward(block(1), x)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got, total) == (identities == 0)
