"""Attention of one token, whose bits do not depend on the room for further tokens.

Keys and values are divided into splits of 256 tokens. A program computes the attention of a key
head's queries, at most 16, over one split; a second launch merges the splits in order (flash
decoding). Programs of splits beyond the last token end at once. So a launch for any number of
tokens, in a CUDA graph, has the bits of a launch for just as many. In a sliding window, splits
begin at its first token.

Latent attention (DeepSeek-V2, 2.1) stores two vectors of a token, in place of keys and values of
each head. All heads have the same key, both vectors one behind the other, and the same value, the
first vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from greenroom.runtime.kernels.triton.kernel import Launch, on_device
from greenroom.runtime.kernels.triton.programs import dot

SPLIT: tl.constexpr = tl.constexpr(256)  # tokens
ROWS: tl.constexpr = tl.constexpr(16)  # queries of a program; fewer are padded
BLOCK, LATENT_BLOCK = 64, 32  # tokens that a program computes at a time
WIDEST, LATENT_WIDEST = 256, 512  # numbers of a key or value
# A mask of a user's may have -inf, and a block of such scores would have no largest one.
LEAST: tl.constexpr = tl.constexpr(-3e38)


@triton.jit
def attend_to_split(
    query, further, keys, values, mask, first, tokens, scale, D: tl.constexpr, V: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of queries [ROWS, WIDTH] over the split that begins at `first`.

    further: the queries' products with `values`, [ROWS, VALUES], if LATENT
    Returns sums, the largest scores and the sums of weights; other arguments are those of `attend`.
    """
    d, v = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH if LATENT else VALUES), tl.float32)
    for begin in range(0, SPLIT, BLOCK):
        token = first + begin + tl.arange(0, BLOCK)
        inside = token < tokens
        key = tl.load(
            keys + token[:, None].to(tl.int64) * D + d[None, :],
            mask=inside[:, None] & (d[None, :] < D), other=0.0,
        )  # fmt: skip
        value = tl.load(
            values + token[:, None].to(tl.int64) * V + v[None, :],
            mask=inside[:, None] & (v[None, :] < V), other=0.0,
        )  # fmt: skip
        scores = dot(query, tl.trans(key), tl.zeros((ROWS, BLOCK), tl.float32), WIDE)
        if LATENT:
            scores = dot(further, tl.trans(value), scores, WIDE)
            value = key
        scores = scores * scale
        if MASKED:
            bias = tl.load(mask + token, mask=inside, other=0.0).to(tl.float32)
            scores += tl.maximum(bias, LEAST)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        old = tl.exp(most - larger)
        total = total * old + tl.sum(weights, 1)
        sums = dot(weights.to(value.dtype), value, sums * old[:, None], WIDE)
        most = larger
    return sums, most, total


@triton.jit(do_not_specialize=("tokens", "limit", "splits"))
def attend(
    q, keys, values, mask, fields, position, parts, tokens, key_stride, value_stride, limit, scale,
    splits, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr,
    MASKED: tl.constexpr, INDIRECT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of some of a key head's G queries over one split.

    q:        [heads, D], if LATENT [heads, D + V]
    keys, values, key_stride, value_stride: addresses and distances between heads, in numbers
    mask:     [tokens], added to the scores if MASKED
    fields:   the four numbers above in the device's memory, in place of these if INDIRECT
    position: [1], the number of tokens before this one. If INDIRECT, attention is to it and the
              last of these, in all at most `limit`, in place of `tokens`
    parts:    [heads, splits, V + 2] float32: sums, the largest score, the sum of weights; if LATENT
              D in place of V
    WIDE:     products in float32, as the interpreter has none of bfloat16
    """
    BLOCKS: tl.constexpr = (G + ROWS - 1) // ROWS
    OUT: tl.constexpr = D if LATENT else V
    Q: tl.constexpr = D + V if LATENT else D
    head, split = tl.program_id(0) // BLOCKS, tl.program_id(1)
    if INDIRECT:
        last = tl.load(position) + 1
        tokens = tl.minimum(last, limit).to(tl.int32)
        keys = tl.multiple_of(tl.load(fields).to(q.dtype), 16)  # for loads of 128 bits
        values = tl.multiple_of(tl.load(fields + 1).to(q.dtype), 16)
        key_stride = tl.multiple_of(tl.load(fields + 2), 8)
        value_stride = tl.multiple_of(tl.load(fields + 3), 8)
        keys += (last - tokens) * D
        values += (last - tokens) * V
    if split * SPLIT < tokens:
        d, v = tl.arange(0, WIDTH), tl.arange(0, VALUES)
        rows = (tl.program_id(0) % BLOCKS) * ROWS + tl.arange(0, ROWS)
        inside, of_head = rows < G, head * G + rows
        queries = q + of_head[:, None] * Q
        query = tl.load(queries + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
        further, column = query, v
        if LATENT:
            column = d
            further = tl.load(
                queries + D + v[None, :], mask=inside[:, None] & (v[None, :] < V), other=0.0
            )
        sums, most, total = attend_to_split(
            query, further, keys + head * key_stride, values + head * value_stride, mask,
            split * SPLIT, tokens, scale, D, V, WIDTH, VALUES, BLOCK, LATENT, MASKED, WIDE,
        )  # fmt: skip
        part = parts + (of_head * splits + split) * (OUT + 2)
        tl.store(
            part[:, None] + column[None, :], sums, mask=inside[:, None] & (column[None, :] < OUT)
        )
        tl.store(part + OUT, most, mask=inside)
        tl.store(part + OUT + 1, total, mask=inside)


@triton.jit(do_not_specialize=("tokens", "limit", "splits"))
def merge(
    parts, out, sinks, position, tokens, limit, splits, V: tl.constexpr, VALUES: tl.constexpr,
    SINKS: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head's attention `parts`, in order, into out [heads, V].

    sinks: [heads], if SINKS: the score of one more token of each head, whose value is 0
    """
    head = tl.program_id(0)
    if INDIRECT:
        tokens = tl.minimum(tl.load(position) + 1, limit).to(tl.int32)
    v = tl.arange(0, VALUES)
    most, total, sums = float("-inf"), 0.0, tl.zeros((VALUES,), tl.float32)
    if SINKS:
        most, total = tl.load(sinks + head).to(tl.float32), 1.0
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
    """Write a token's keys k [heads, D] and values v [heads, V] behind earlier ones."""
    head, at = tl.program_id(0), tl.load(position).to(tl.int64)
    keys, values = tl.load(fields).to(k.dtype), tl.load(fields + 1).to(v.dtype)
    keys += head * tl.load(fields + 2) + at * D
    values += head * tl.load(fields + 3) + at * V
    column = tl.arange(0, WIDTH)
    tl.store(keys + column, tl.load(k + head * D + column, mask=column < D), mask=column < D)
    tl.store(values + column, tl.load(v + head * V + column, mask=column < V), mask=column < V)


def attend_to_all(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None,
    sinks: Tensor | None = None, latent: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention of one token to all tokens, as [1, 1, heads, V].

    query [1, heads, 1, D]; keys and values [1, key heads, tokens, D or V], of the same type, whose
    rows lie one behind the other (`is_supported`).
    mask:   [1, 1, 1, tokens], added to the scores
    sinks:  [heads], scores that add to the sum of weights
    latent: `keys` and `values` are the two vectors of a token; query [1, heads, 1, D + V], and the
            result is [1, 1, heads, D]
    """
    strides = keys.stride(1), values.stride(1)
    options = _Options(keys.shape[2], None, mask, sinks, latent)
    return _launch(query, keys, values, strides, None, scale, options)


def attend_in_place(
    query: Tensor, key: Tensor, value: Tensor, fields: Tensor, position: Tensor, scale: float,
    room: int, sinks: Tensor | None = None, latent: bool = False,
) -> Tensor:  # fmt: skip
    """Append a token's keys and values, and return its attention to the last tokens.

    query [1, heads, 1, D], key [1, key heads, 1, D] and value [1, key heads, 1, V] of the token
    fields:   [4] int64: addresses of the first token's keys and values, in tensors [1, key heads,
              any, D or V], and the distances between heads in them, in numbers. Tokens that
              attention does not reach need not be there
    position: [1] int64, the number of tokens before this one
    room:     the most tokens that attention is to
    sinks, latent: see `attend_to_all`

    Returns [1, 1, heads, V]. Nothing depends on the host's memory, so a CUDA graph can have it.
    """
    key_heads, (width, values_width) = key.shape[1], (x.shape[3] for x in (key, value))
    both = triton.next_power_of_2(max(width, values_width))
    constants = {"D": width, "V": values_width, "WIDTH": both, "num_warps": 1}
    tensors = key.contiguous(), value.contiguous(), fields, position
    with on_device(query.device):
        Launch(append, (key_heads, 1), tensors, constants).start()
    options = _Options(room, position, None, sinks, latent)
    return _launch(query, key, value, (0, 0), fields, scale, options)


class _Options(NamedTuple):
    """What attention depends on beside queries, keys and values; see `attend_to_all`.

    tokens: the tokens that attention is to, with a `position` the most of them
    """

    tokens: int
    position: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    latent: bool


def _launch(
    query: Tensor, keys: Tensor, values: Tensor, strides: tuple[int, int], fields: Tensor | None,
    scale: float, options: _Options,
) -> Tensor:  # fmt: skip
    tokens, position, mask, sinks, latent = options
    heads, key_heads, width, values_width = query.shape[1], *keys.shape[1::2], values.shape[3]
    group, out_width = heads // key_heads, width if latent else values_width
    splits, none = -(-tokens // SPLIT.value), query.new_empty(0)
    parts = query.new_empty(heads, splits, out_width + 2, dtype=torch.float32)
    out = query.new_empty(1, 1, heads, out_width)
    padded, padded_values, padded_out = (
        max(16, triton.next_power_of_2(each)) for each in (width, values_width, out_width)
    )
    constants = {
        "INDIRECT": position is not None, "num_warps": 4,
        "enable_fp_fusion": False,  # so that both variants round alike
    }  # fmt: skip
    of_attend = {
        "G": group, "D": width, "V": values_width, "WIDTH": padded, "VALUES": padded_values,
        "BLOCK": LATENT_BLOCK if latent else BLOCK, "LATENT": latent, "MASKED": mask is not None,
        "WIDE": query.device.type == "cpu",
    }  # fmt: skip
    of_merge = {"V": out_width, "VALUES": padded_out, "SINKS": sinks is not None}
    mask = none if mask is None else mask.reshape(-1)
    fields, position = (none if each is None else each for each in (fields, position))
    blocks = key_heads * -(-group // ROWS.value)
    with on_device(query.device):
        tensors = query.contiguous(), keys, values, mask, fields, position, parts
        numbers = tokens, *strides, tokens, scale, splits
        Launch(attend, (blocks, splits), (*tensors, *numbers), constants | of_attend).start()
        merged = parts, out, none if sinks is None else sinks, position, tokens, tokens, splits
        Launch(merge, (heads, 1), merged, constants | of_merge).start()
    return out


def is_supported(query: Tensor, keys: Tensor, values: Tensor, latent: bool = False) -> bool:
    """Return whether `attend_to_all` can compute attention of these shapes, types and places."""
    width, values_width = keys.shape[3], values.shape[3]
    return (
        query.shape[0] == query.shape[2] == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype is keys.dtype is values.dtype
        and query.shape[1] % keys.shape[1] == 0
        and query.shape[3] == width + values_width * latent
        and width % 8 == values_width % 8 == 0  # loads of 128 bits
        and max(width, values_width) <= (LATENT_WIDEST if latent else WIDEST)
        and keys.shape[1] == values.shape[1]
        and all(map(_has_rows, (keys, values)))
    )


def _has_rows(tensor: Tensor) -> bool:
    """Tell whether the rows [heads, tokens, width] of a tensor lie one behind the other."""
    tokens, width = tensor.shape[2:]
    return tensor.stride(3) == 1 and (tokens == 1 or tensor.stride(2) == width)
