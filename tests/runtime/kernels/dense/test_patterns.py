"""Decoder layers and blocks known by what they do with what their parts give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from greenroom.runtime.kernels.dense.patterns import BlockParts, find_block_parts, find_sublayers

HIDDEN, DTYPE = 48, torch.bfloat16


class Layer(nn.Module):
    """The common kind; the others differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("before", "look", "after", "think", "unused"):
            setattr(self, name, nn.Identity())

    def attend(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.look(hidden_states=self.before(x), **kwargs)[0]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        hidden_states = hidden_states + self.attend(hidden_states, **kwargs)
        return hidden_states + self.think(self.after(hidden_states))


class Scaled(Layer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        hidden_states = hidden_states + 0.22 * self.attend(hidden_states, **kwargs)
        return hidden_states + self.think(self.after(hidden_states))


class Clamped(Layer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **kwargs).clamp(-1e3, 1e3)


class Parallel(Layer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        normed = self.after(hidden_states)
        return hidden_states + self.attend(hidden_states, **kwargs) + self.think(normed)


class InFloat(Layer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        x = hidden_states.float() + self.attend(hidden_states, **kwargs).float()
        return (x + self.think(self.after(x.to(hidden_states.dtype)))).to(hidden_states.dtype)


class Tuple(Layer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return (super().forward(hidden_states, **kwargs),)


class Masked(Layer):
    def attend(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().attend(x, **{**kwargs, "attention_mask": x})


class Uncached(Layer):
    def attend(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().attend(x, **{**kwargs, "past_key_values": None})


class Configured(Layer):
    """A layer whose block has a second input besides the hidden state."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        hidden_states = hidden_states + self.attend(hidden_states, **kwargs)
        return hidden_states + self.think(self.after(hidden_states), hidden_states)


class Demanding(Layer):
    def forward(self, hidden_states: Tensor, *, position_bias: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **kwargs)


def find(layer: nn.Module) -> Any:
    return find_sublayers(layer, "look", {"before", "after"}, HIDDEN, DTYPE)


def test_sublayers_of_a_common_layer_are_found_without_changing_it():
    layer = Layer()
    before = dict(vars(layer)), dict(layer._modules)
    assert find(layer) == ("before", "after", "think")
    assert (dict(vars(layer)), dict(layer._modules)) == before
    assert find_sublayers(layer, "look", {"before"}, HIDDEN, DTYPE) is None  # the other is no norm
    assert find_sublayers(layer, "think", {"before", "after"}, HIDDEN, DTYPE) is None


@pytest.mark.parametrize(
    "kind", [Scaled, Clamped, Parallel, InFloat, Tuple, Masked, Uncached, Configured, Demanding]
)
def test_layers_that_compute_otherwise_do_not_match(kind):
    assert find(kind()) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.door, self.many, self.shared = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        _, weights, index = self.door(x.view(-1, HIDDEN))
        return self.many(x.view(-1, HIDDEN), index, weights).reshape(x.shape)


class Deep(Block):
    def forward(self, x: Tensor) -> Tensor:
        _, weights, index = self.door(x)
        return self.many(x.view(-1, HIDDEN), index, weights).view(x.shape)


class Shared(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)


class Doubled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Weighted(Block):
    def forward(self, x: Tensor) -> Tensor:
        _, weights, index = self.door(x.view(-1, HIDDEN))
        return self.many(x.view(-1, HIDDEN), index, weights * 2.5).reshape(x.shape)


class Sorted(Block):
    def forward(self, x: Tensor) -> Tensor:
        _, weights, index = self.door(x.view(-1, HIDDEN))
        return self.many(x.view(-1, HIDDEN), index.sort().values, weights).reshape(x.shape)


class Jittered(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.01)


class SharedFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        added = self.shared(x.view(-1, HIDDEN))
        return (super().forward(x).view(-1, HIDDEN) + added).view(x.shape)


class SharedScaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x) * 0.5


class SharedOfOther(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x * 2)


class SharedTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x) + self.shared(x)


class Unused(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.shared(x)
        return super().forward(x)


def test_the_parts_of_an_moe_block_are_found():
    def parts(block: nn.Module, experts: str = "many") -> BlockParts | None:
        return find_block_parts(block, experts, HIDDEN, DTYPE)

    assert parts(Block()) == BlockParts("door", (1, HIDDEN))
    assert parts(Deep()) == BlockParts("door", (1, 1, HIDDEN))
    assert parts(Block(), "door") is None
    assert parts(Shared()) == BlockParts("door", (1, HIDDEN), "shared")
    assert parts(SharedFirst()) == BlockParts("door", (1, HIDDEN), "shared")


@pytest.mark.parametrize(
    "kind",
    [
        *(Doubled, Weighted, Sorted, Jittered),
        *(SharedScaled, SharedOfOther, SharedTwice, Unused),
    ],
)
def test_blocks_that_compute_otherwise_do_not_match(kind):
    assert find_block_parts(kind(), "many", HIDDEN, DTYPE) is None
