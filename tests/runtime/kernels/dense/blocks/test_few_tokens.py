"""A block is called once for several tokens, and its router once for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from greenroom.runtime.kernels.dense.blocks.few_tokens import call_for_tokens

HIDDEN = 64


class Router(nn.Module):
    """A router that torch computes; it records how many tokens each call has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, HIDDEN))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, HIDDEN)
        self.calls.append(len(rows))
        scores = rows @ self.weight.T
        return scores, scores.topk(2).indices


class Experts(nn.Module):
    """Experts whose kernel computes tokens one by one."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, HIDDEN))
        self.calls: list[int] = []

    def _apply_gate(self) -> None: ...

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.calls.append(len(x))
        return x * self.weight[index].sum(1)


class Block(nn.Module):
    """An MoE block with a shared expert."""

    def __init__(self, width: int = HIDDEN, compiled: bool = True) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(), Experts(), nn.Linear(HIDDEN, width)
        self.out, self.calls = nn.Linear(width, HIDDEN), 0
        if compiled:
            for part in (self.shared, self.out):
                part.forward = lambda x, part=part: row_by_row(part, x)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        _, index = self.router(x)
        experts = self.experts(x.view(-1, HIDDEN), index).view(x.shape)
        return experts + self.out(torch.nn.functional.silu(self.shared(x)))


def row_by_row(part: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([nn.Linear.forward(part, each) for each in x.split(1, 1)], 1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


def alone(block: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([block(each) for each in x.split(1, 1)], 1)


@torch.no_grad()
def test_a_block_is_called_once_and_its_router_for_each_token(x: Tensor) -> None:
    block = Block()
    expected = alone(block, x)
    block.calls = 0
    block.router.calls.clear()
    block.experts.calls.clear()
    assert torch.equal(call_for_tokens(block, x), expected)
    assert (block.calls, block.router.calls, block.experts.calls) == (1, [1] * 5, [5])
    assert "forward" not in vars(block.router)


@torch.no_grad()
def test_parts_that_torch_computes_are_called_token_by_token_too(x: Tensor) -> None:
    block, sizes = Block(compiled=False), list[int]()
    expected = alone(block, x)
    block.shared.register_forward_pre_hook(lambda part, args: sizes.append(args[0].shape[1]))
    assert torch.equal(call_for_tokens(block, x), expected)
    assert sizes == [5]  # a hook sees the call for all tokens


@torch.no_grad()
def test_a_width_that_leaves_part_of_a_vector_computes_tokens_one_by_one(x: Tensor) -> None:
    block = Block(width=72)
    expected = alone(block, x)
    block.calls = 0
    assert torch.equal(call_for_tokens(block, x), expected)
    assert block.calls == 5


class Odd(Router):
    """A router whose output has another form."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Tensor) -> Any:
        self.calls.append(x.numel() // HIDDEN)
        return super().forward(x)[0], self.out(x)


@pytest.mark.parametrize("out", [lambda x: "text", lambda x: torch.zeros(()),
                                 lambda x: torch.zeros(3, 2, dtype=torch.int64)])  # fmt: skip
@torch.no_grad()
def test_a_router_with_other_outputs_computes_tokens_one_by_one(out: Any, x: Tensor) -> None:
    block = Block()
    block.router = Odd(out)
    block.experts.forward = lambda x, index: x  # type: ignore[method-assign]
    expected = alone(block, x)
    block.calls = 0
    assert torch.equal(call_for_tokens(block, x), expected)
    assert block.calls == 6  # the first call ends in the router
    assert "forward" not in vars(block.router)


@torch.no_grad()
def test_one_token_is_the_block_s_own_call(x: Tensor) -> None:
    block = Block()
    assert torch.equal(call_for_tokens(block, x[:, :1]), block(x[:, :1]))
    assert block.router.calls == [1, 1]
