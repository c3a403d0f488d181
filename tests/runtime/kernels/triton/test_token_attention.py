"""Attention of one token in Triton's interpreter: values, and the same bits with any room."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton", reason="needs Triton")

from greenroom.runtime.cuda.token_graph import LayerStates
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
# Heads, key heads, width of keys, width of values, tokens. Latent attention has one key head, and
# the widths are those of the two vectors of a token.
CASES = [
    (8, 2, 64, 64, 300), (4, 4, 24, 16, 257), (3, 1, 128, 128, 1), (20, 1, 32, 32, 600),
    (2, 2, 192, 128, 256), (4, 2, 16, 16, 64),
]  # fmt: skip
LATENT = [(20, 1, 64, 16, 300), (4, 1, 24, 8, 40), (16, 1, 512, 64, 70)]
ALL = [*((case, False) for case in CASES), *((case, True) for case in LATENT)]


def tensors(
    case: tuple[int, ...], dtype: torch.dtype, room: int, latent: bool = False
) -> list[torch.Tensor]:
    """A query, and all tokens' keys and values with room for further ones."""
    heads, key_heads, width, values, tokens = case
    draw = torch.Generator().manual_seed(sum(case))
    query = (1, heads, 1, width + latent * values)
    shapes = query, *((1, key_heads, tokens, n) for n in (width, values))
    made = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    for at in (1, 2):  # what lies behind the tokens must not matter
        larger = made[at].new_full((1, key_heads, tokens + room, made[at].shape[3]), float("nan"))
        larger[:, :, :tokens] = made[at]
        made[at] = larger[:, :, :tokens]
    return made


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, latent: bool,
) -> torch.Tensor:  # fmt: skip
    """Torch's attention in float64; a sink is one more token, whose value is 0."""
    if latent:
        keys, values = torch.cat((keys, values), 3), keys
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    bias = query.new_zeros(1, query.shape[1], 1, keys.shape[2]) if mask is None else mask
    bias = bias.double().expand(1, query.shape[1], 1, -1)
    if sinks is not None:
        keys, values = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (keys, values))
        bias = torch.cat((bias, sinks.double().view(1, -1, 1, 1)), 3)
    attended = scaled_dot_product_attention(query.double(), keys, values, bias, scale=SCALE)
    return attended.transpose(1, 2)


@pytest.mark.parametrize(("has_sinks", "has_mask"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("case", "latent"), ALL)
def test_attention_is_that_of_torch(case, latent, dtype, has_sinks, has_mask):
    query, keys, values = tensors(case, dtype, 5, latent)
    assert is_supported(query, keys, values, latent)
    sinks = torch.linspace(-1, 4, case[0]).to(dtype) if has_sinks else None
    mask = None
    if has_mask:  # of padding, as transformers and as users have it
        mask = torch.zeros(1, 1, 1, case[-1], dtype=dtype)
        mask[..., : case[-1] // 2] = float("-inf")
        mask[..., : case[-1] // 4] = torch.finfo(dtype).min
    out = attend_to_all(query, keys, values, SCALE, mask, sinks, latent)
    exact = exact_attention(query, keys, values, mask, sinks, latent)
    assert out.shape == exact.shape
    step = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 2 * step * exact.abs().max()


def test_a_mask_of_zeros_changes_no_bit():
    query, keys, values = tensors(CASES[0], torch.bfloat16, 5)
    mask = torch.zeros(1, 1, 1, keys.shape[2], dtype=torch.bfloat16)
    masked = attend_to_all(query, keys, values, SCALE, mask)
    assert torch.equal(masked, attend_to_all(query, keys, values, SCALE))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("case", "latent"), ALL)
def test_bits_do_not_depend_on_room_or_on_where_numbers_come_from(case, latent, has_sinks):
    tokens = case[-1]
    query, keys, values = tensors(case, torch.bfloat16, 7, latent)
    sinks = torch.linspace(-1, 4, case[0]).bfloat16() if has_sinks else None
    expected = attend_to_all(query, keys, values, SCALE, None, sinks, latent)
    others = tensors(case, torch.bfloat16, 300, latent)[1:]
    assert torch.equal(attend_to_all(query, *others, SCALE, None, sinks, latent), expected)
    key, value = (x[:, :, -1:].clone() for x in (keys, values))
    for x in (keys, values):
        x[:, :, -1:] = float("nan")  # the launch writes it
    fields, position = torch.tensor(LayerStates(keys, values).fields()), torch.tensor([tokens - 1])
    for room in (tokens, tokens + 3 * SPLIT.value):
        out = attend_in_place(query, key, value, fields, position, SCALE, room, sinks, latent)
        assert torch.equal(out, expected)
        assert torch.equal(keys[:, :, -1:], key)
        assert torch.equal(values[:, :, -1:], value)


@pytest.mark.parametrize(
    ("window", "dropped"), [(1, 0), (40, 0), (40, 1000), (256, 3), (290, 1000), (600, 0)]
)
def test_a_window_has_the_bits_of_its_tokens_alone(window, dropped):
    """Rows of earlier tokens may be there, or may have been there."""
    case = CASES[0]
    query, keys, values = tensors(case, torch.bfloat16, 7)
    seen = slice(max(0, case[-1] - window), None)
    expected = attend_to_all(query, keys[:, :, seen], values[:, :, seen], SCALE)
    key, value = (x[:, :, -1:].clone() for x in (keys, values))
    for x in (keys, values):
        x[:, :, : seen.start] = float("nan")
    fields = torch.tensor(LayerStates(keys, values, dropped).fields())
    position = torch.tensor([dropped + case[-1] - 1])
    assert torch.equal(
        attend_in_place(query, key, value, fields, position, SCALE, window), expected
    )


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
    assert not is_supported(query, keys, values, latent=True)
    assert not is_supported(query[..., :12], keys[..., :12].contiguous(), values)
