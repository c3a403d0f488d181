"""Attention of one token on a GPU, whose bits do not depend on the room for further tokens.

Keys and values are divided into splits of 256 tokens. A program computes the attention of a key
head's queries over one split; a second launch merges the splits in order (flash decoding). Programs
of splits beyond the last token end at once. So a launch for any number of tokens, in a CUDA graph,
has the bits of a launch for just as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from greenroom.runtime.kernels.triton.kernel import Launch
from greenroom.runtime.kernels.triton.programs import dot

SPLIT: tl.constexpr = tl.constexpr(256)  # tokens
BLOCK: tl.constexpr = tl.constexpr(64)  # tokens that a program computes at a time
WIDEST = 256  # channels of a head


@triton.jit(do_not_specialize=("tokens",))
def attend(
    q, keys, values, fields, position, parts, tokens, key_stride, value_stride, scale, splits,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, INDIRECT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one key head's G queries over one split, in Triton.

    q:        [heads, D]
    keys, values, key_stride, value_stride: addresses and distances between heads, in numbers
    fields:   the same four numbers in the device's memory, in place of these if INDIRECT
    position: [1], the number of tokens before this one, in place of `tokens` - 1 if INDIRECT
    parts:    [heads, splits, V + 2] float32: sums, the largest score, the sum of weights
    WIDE:     products in float32, as the interpreter has none of bfloat16
    """
    head, split = tl.program_id(0), tl.program_id(1)
    if INDIRECT:
        tokens = tl.load(position) + 1
        keys = tl.multiple_of(tl.load(fields).to(q.dtype), 16)  # for loads of 128 bits
        values = tl.multiple_of(tl.load(fields + 1).to(q.dtype), 16)
        key_stride = tl.multiple_of(tl.load(fields + 2), 8)
        value_stride = tl.multiple_of(tl.load(fields + 3), 8)
    first = split * SPLIT
    if first < tokens:
        rows, d, v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, VALUES)
        of_head = head * G + rows
        query = tl.load(
            q + of_head[:, None] * D + d[None, :],
            mask=(rows[:, None] < G) & (d[None, :] < D), other=0.0,
        )  # fmt: skip
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, VALUES), tl.float32)
        keys += head * key_stride
        values += head * value_stride
        for begin in range(0, SPLIT, BLOCK):
            token = first + begin + tl.arange(0, BLOCK)
            key = tl.load(
                keys + token[None, :].to(tl.int64) * D + d[:, None],
                mask=(token[None, :] < tokens) & (d[:, None] < D), other=0.0,
            )  # fmt: skip
            scores = dot(query, key, tl.zeros((ROWS, BLOCK), tl.float32), WIDE) * scale
            scores = tl.where(token[None, :] < tokens, scores, float("-inf"))
            larger = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp(scores - larger[:, None])
            old = tl.exp(most - larger)
            total = total * old + tl.sum(weights, 1)
            value = tl.load(
                values + token[:, None].to(tl.int64) * V + v[None, :],
                mask=(token[:, None] < tokens) & (v[None, :] < V), other=0.0,
            )  # fmt: skip
            sums = dot(weights.to(value.dtype), value, sums * old[:, None], WIDE)
            most = larger
        part = parts + (of_head * splits + split) * (V + 2)
        inside = rows < G
        tl.store(part[:, None] + v[None, :], sums, mask=inside[:, None] & (v[None, :] < V))
        tl.store(part + V, most, mask=inside)
        tl.store(part + V + 1, total, mask=inside)


@triton.jit(do_not_specialize=("tokens",))
def merge(
    parts, out, position, tokens, splits, V: tl.constexpr, VALUES: tl.constexpr,
    INDIRECT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head's attention `parts`, in order, into out [heads, V]."""
    head = tl.program_id(0)
    if INDIRECT:
        tokens = tl.load(position) + 1
    v = tl.arange(0, VALUES)
    most, total, sums = float("-inf"), 0.0, tl.zeros((VALUES,), tl.float32)
    for split in range(tl.cdiv(tokens, SPLIT)):
        part = parts + (head * splits + split) * (V + 2)
        of_split, weight = tl.load(part + V), tl.load(part + V + 1)
        larger = tl.maximum(most, of_split)
        old, new = tl.exp(most - larger), tl.exp(of_split - larger)
        total = total * old + weight * new
        sums = sums * old + tl.load(part + v, mask=v < V, other=0.0) * new
        most = larger
    tl.store(out + head * V + v, (sums / total).to(out.dtype.element_ty), mask=v < V)


@triton.jit
def append(k, v, fields, position, D: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr):
    """Write one token's keys k [heads, D] and values v [heads, V] behind those before it."""
    head, at = tl.program_id(0), tl.load(position).to(tl.int64)
    keys, values = tl.load(fields).to(k.dtype), tl.load(fields + 1).to(v.dtype)
    keys += head * tl.load(fields + 2) + at * D
    values += head * tl.load(fields + 3) + at * V
    column = tl.arange(0, WIDTH)
    tl.store(keys + column, tl.load(k + head * D + column, mask=column < D), mask=column < D)
    tl.store(values + column, tl.load(v + head * V + column, mask=column < V), mask=column < V)


def attend_to_all(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the attention of one token to all tokens, as [1, 1, heads, V].

    query [1, heads, 1, D]; keys and values [1, key heads, tokens, D or V], of the same type, whose
    rows lie one behind the other (`is_supported`).
    """
    heads, tokens = query.shape[1], keys.shape[2]
    fields = query.new_empty(0)
    splits = -(-tokens // SPLIT.value)
    return _launch(
        query, keys, values, fields, fields, tokens, keys.stride(1), values.stride(1), scale,
        splits, (heads, keys.shape[1], query.shape[3], values.shape[3]), indirect=False,
    )  # fmt: skip


def attend_in_place(
    query: Tensor, key: Tensor, value: Tensor, fields: Tensor, position: Tensor, scale: float,
    room: int,
) -> Tensor:  # fmt: skip
    """Append a token's keys and values to those before it, and return its attention to all tokens.

    query [1, heads, 1, D], key [1, key heads, 1, D] and value [1, key heads, 1, V] of the token
    fields:   [4] int64: addresses of the tensors of keys and values [1, key heads, any, D or V],
              and the distances between heads in them, in numbers
    position: [1] int64, the number of tokens before this one
    room:     the most tokens that the launches are for

    Returns [1, 1, heads, V]. Nothing depends on the host's memory, so a CUDA graph can have it.
    """
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    width = triton.next_power_of_2(max(sizes[2:]))
    constants = {"D": sizes[2], "V": sizes[3], "WIDTH": width, "num_warps": 1}
    Launch(append, (sizes[1], 1), (key.contiguous(), value.contiguous(), fields, position),
           constants).start()  # fmt: skip
    splits = -(-room // SPLIT.value)
    return _launch(
        query, key, value, fields, position, 1, 0, 0, scale, splits, sizes, indirect=True
    )


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, fields: Tensor, position: Tensor, tokens: int,
    key_stride: int, value_stride: int, scale: float, splits: int,
    sizes: tuple[int, int, int, int], indirect: bool,
) -> Tensor:  # fmt: skip
    heads, key_heads, width, values_width = sizes
    parts = query.new_empty(heads, splits, values_width + 2, dtype=torch.float32)
    out = query.new_empty(1, 1, heads, values_width)
    group, powers = heads // key_heads, map(triton.next_power_of_2, (width, values_width))
    padded, padded_values = (max(16, power) for power in powers)
    constants = {"V": values_width, "VALUES": padded_values, "INDIRECT": indirect, "num_warps": 4}
    arguments = query.contiguous(), keys, values, fields, position, parts, tokens, key_stride
    of_attend = {
        "G": group, "D": width, "ROWS": max(16, triton.next_power_of_2(group)), "WIDTH": padded,
        "WIDE": query.device.type == "cpu",
    }  # fmt: skip
    Launch(
        attend, (key_heads, splits), (*arguments, value_stride, scale, splits),
        constants | of_attend,
    ).start()  # fmt: skip
    Launch(merge, (heads, 1), (parts, out, position, tokens, splits), constants).start()
    return out


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether `attend_to_all` can compute attention of these shapes, types and places."""
    return (
        query.shape[0] == query.shape[2] == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype is keys.dtype is values.dtype
        and query.shape[1] % keys.shape[1] == 0
        and max(query.shape[3], values.shape[3]) <= WIDEST
        and keys.shape[1] == values.shape[1]
        and all(map(_has_rows, (keys, values)))
    )


def _has_rows(tensor: Tensor) -> bool:
    """Tell whether the rows [heads, tokens, width] of a tensor lie one behind the other."""
    tokens, width = tensor.shape[2:]
    return tensor.stride(3) == 1 and (tokens == 1 or tensor.stride(2) == width)
