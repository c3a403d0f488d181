"""Attention of one token in Triton's interpreter: values, and the same bits with any room."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton", reason="needs Triton")

from greenroom.runtime.kernels.triton.token_attention import (
    SPLIT,
    attend_in_place,
    attend_to_all,
    is_supported,
)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]
SCALE = 0.3
# Heads, key heads, width of keys, width of values, tokens.
CASES = [
    (8, 2, 64, 64, 300), (4, 4, 24, 16, 257), (3, 1, 128, 128, 1), (20, 1, 32, 32, 600),
    (2, 2, 192, 128, 256), (4, 2, 16, 16, 64),
]  # fmt: skip


def tensors(case: tuple[int, ...], dtype: torch.dtype, room: int) -> list[torch.Tensor]:
    """A query, and keys and values of all tokens in tensors with room for further ones."""
    heads, key_heads, width, values, tokens = case
    draw = torch.Generator().manual_seed(sum(case))
    shapes = (1, heads, 1, width), *((1, key_heads, tokens, n) for n in (width, values))
    made = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    for at in (1, 2):  # what lies behind the tokens must not matter
        larger = made[at].new_full((1, key_heads, tokens + room, made[at].shape[3]), float("nan"))
        larger[:, :, :tokens] = made[at]
        made[at] = larger[:, :, :tokens]
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_torch(case, dtype):
    query, keys, values = tensors(case, dtype, 5)
    assert is_supported(query, keys, values)
    out = attend_to_all(query, keys, values, SCALE)
    group = case[0] // case[1]
    exact = scaled_dot_product_attention(
        query.double(), *(x.double().repeat_interleave(group, 1) for x in (keys, values)),
        scale=SCALE,
    ).transpose(1, 2)  # fmt: skip
    assert out.shape == exact.shape
    step = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 2 * step * exact.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_room_or_on_where_numbers_come_from(case):
    tokens = case[-1]
    query, keys, values = tensors(case, torch.bfloat16, 7)
    expected = attend_to_all(query, keys, values, SCALE)
    assert torch.equal(
        attend_to_all(query, *tensors(case, torch.bfloat16, 300)[1:], SCALE), expected
    )
    key, value = (x[:, :, -1:].clone() for x in (keys, values))
    for x in (keys, values):
        x[:, :, -1:] = float("nan")  # the launch writes it
    numbers = [x.data_ptr() for x in (keys, values)] + [x.stride(1) for x in (keys, values)]
    for room in (tokens, tokens + 3 * SPLIT.value):
        out = attend_in_place(
            query, key, value, torch.tensor(numbers), torch.tensor([tokens - 1]), SCALE, room
        )
        assert torch.equal(out, expected)
        assert torch.equal(keys[:, :, -1:], key)
        assert torch.equal(values[:, :, -1:], value)


def test_other_shapes_types_and_places_are_not_supported():
    query, keys, values = tensors((4, 2, 16, 16, 9), torch.bfloat16, 0)
    assert is_supported(query, keys, values)
    assert not is_supported(query.float(), keys.float(), values.float())
    assert not is_supported(query, keys.half(), values)
    assert not is_supported(query.repeat(1, 1, 2, 1), keys, values)
    assert not is_supported(query[:, :3], keys, values)
    assert not is_supported(query, keys.transpose(2, 3).contiguous().transpose(2, 3), values)
    wide = torch.zeros(1, 2, 9, 272, dtype=torch.bfloat16)
    assert not is_supported(query, keys, wide)
