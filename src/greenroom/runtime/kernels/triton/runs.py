"""Triton functions that read GGUF types whose codes, scales and minima lie in several fields.

A *run* is 16 consecutive weights, of which each byte of a chunk has one. A chunk has two runs; all
weights of a run have the same scale and minimum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.chunks import half, load_packed


@triton.jit
def _merged(low, high, COUNT: tl.constexpr):
    """Take the lowest COUNT bits of each byte of words from `low`, the others from `high`."""
    MASK: tl.constexpr = 0x01010101 * ((1 << COUNT) - 1)
    return (low & MASK) | (high & (-1 - MASK))


@triton.jit
def _load(pointer, row, k):
    """Load a number for each chunk k [C] of rows, which begin at `row` [N, 1]: [N, C].

    The compiler must not see that numbers are consecutive, as in `load_scales`.
    """
    return tl.load(pointer + tl.max_contiguous(row + k[None, :], (1, 1)))


@triton.jit
def _load_block(codes, scales, others, row, k, ENCODING: tl.constexpr):
    """Load chunks of q4_1, q5_0 or q5_1: blocks of 32 weights, of which 32 bits are fifth bits."""
    packed, head = load_packed(codes, k), _load(scales, row, k)
    first, second = packed, packed
    if ENCODING != "q4_1":
        fifth = _load(others.to(tl.pointer_type(tl.int32)), row, k)
        fifth = fifth[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
        # A product moves four neighbouring bits to the fifth bits of four bytes.
        first = _merged(packed, (fifth & 15) * 0x02040810, 4)
        second = _merged(packed >> 4, ((fifth >> 16) & 15) * 0x02040810, 4)
    if ENCODING == "q5_0":
        s, least = head.to(tl.float32), 0.0
    else:
        s, least = half(head), -half(head >> 16)
    return (first, s, least), (second, s, least)


@triton.jit
def _load_q2_k(codes, scales, others, row, k):
    """Load chunks of q2_k. A chunk takes two of the four codes that a byte has."""
    pair, shift = k // 2, (k % 2 * 8)[None, :]
    packed = load_packed(codes, k // 4 * 2 + k % 2) >> (pair % 2 * 4)[None, :, None]
    both = _load(others.to(tl.pointer_type(tl.int32)), row * 4, pair) >> shift
    head = _load(scales, row, k // 8)
    s, m = half(head), half(head >> 16)
    low, high = s * (both & 15).to(tl.float32), s * ((both >> 16) & 15).to(tl.float32)
    low_least = m * ((both >> 4) & 15).to(tl.float32)
    high_least = m * ((both >> 20) & 15).to(tl.float32)
    return (packed, low, low_least), (packed, high, high_least)


@triton.jit
def _load_q3_k(codes, scales, others, row, span_n, k):
    """Load chunks of q3_k. A chunk takes two of the four codes that a byte has."""
    fields, pair = others.to(tl.pointer_type(tl.int32)), k % 8 // 2
    packed = load_packed(codes, k // 4 * 2 + k % 2) >> (pair % 2 * 4)[None, :, None]
    third = load_packed(fields + row[:, :, None] * 8, k // 8 * 2 + k % 2)
    third = third >> (pair * 2)[None, :, None]
    shift = (k % 2 * 8 + pair // 2 * 4)[None, :]
    six = _load(fields + span_n, row * 3, k // 8 * 3 + pair % 2) >> shift
    top = _load(fields + span_n, row * 3, k // 8 * 3 + 2) >> (shift + (pair % 2 * 2)[None, :])
    six = (six & 0x000F000F) | ((top << 4) & 0x00300030)
    s = _load(scales, row, k // 8).to(tl.float32)
    low, high = ((six & 63) - 32).to(tl.float32), ((six >> 16) - 32).to(tl.float32)
    first, second = _merged(packed, third << 2, 2), _merged(packed >> 2, third << 1, 2)
    return (first, s * low, 0.0), (second, s * high, 0.0)


@triton.jit
def _load_k_block(codes, k, ENCODING: tl.constexpr):
    """Load chunks of q4_k or q5_k, in the order of files.

    A block has SIZE words: both scales as float16, 12 bytes of the scales and minima of 8 groups,
    in q5_k 32 bytes of fifth bits, and 128 bytes of codes.
    """
    SIZE: tl.constexpr = 44 if ENCODING == "q5_k" else 36
    pair, begin = k % 8 // 2, tl.max_contiguous(k // 8 * SIZE, 1)
    packed = load_packed(codes + (begin + SIZE - 32)[None, :, None], k % 8)
    first, second = packed, packed
    if ENCODING == "q5_k":
        fifth = load_packed(codes + (begin + 4)[None, :, None], k % 2) >> (pair * 2)[None, :, None]
        first, second = _merged(packed, fifth << 4, 4), _merged(packed >> 4, fifth << 3, 4)
    head = tl.max_contiguous(tl.reshape(codes, (codes.shape[0], 1)) + begin[None, :], (1, 1))
    both, one, two, three = tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    # Bytes 2 * pair and 2 * pair + 1 of eight: the groups' six bits.
    shift, early = (pair % 2 * 16)[None, :], (pair < 2)[None, :]
    one, two, three = one >> shift, two >> shift, three >> shift
    scale = tl.where(early, one & 0x3F3F, (three & 0x0F0F) | ((one >> 2) & 0x3030))
    least = tl.where(early, two & 0x3F3F, ((three >> 4) & 0x0F0F) | ((two >> 2) & 0x3030))
    s, m = half(both), half(both >> 16)
    low, high = s * (scale & 63).to(tl.float32), s * (scale >> 8).to(tl.float32)
    low_least, high_least = m * (least & 63).to(tl.float32), m * (least >> 8).to(tl.float32)
    return (first, low, low_least), (second, high, high_least)


@triton.jit
def _load_q6_k(codes, scales, others, row, span_n, k):
    """Load chunks of q6_k."""
    fields = others.to(tl.pointer_type(tl.int32))
    packed, j = load_packed(codes, k), k % 4
    pairs = load_packed(fields + row[:, :, None] * 16, k // 4 * 2 + k % 2)
    pairs = pairs >> (j // 2 * 2)[None, :, None]
    eight = _load((fields + span_n).to(tl.pointer_type(tl.int64)), row * 2, k // 4)
    shift = (24 - j * 8)[None, :]
    low = (eight.to(tl.int32) << shift) >> 24
    high = ((eight >> 32).to(tl.int32) << shift) >> 24
    s = _load(scales, row, k // 8).to(tl.float32)
    first, second = _merged(packed, pairs << 4, 4), _merged(packed >> 4, pairs, 4)
    return (first, s * low.to(tl.float32), 0.0), (second, s * high.to(tl.float32), 0.0)


@triton.jit
def load_runs(codes, scales, others, row, span_n, k, ENCODING: tl.constexpr):
    """Load both runs of chunks k [C] of rows.

    `codes` [N, 1, 1] point to the rows, `row` [N, 1] are their first blocks. Except of q4_k and
    q5_k, fields lie in arrays: `others` points to the second one, `span_n` words further is the
    third one, and `scales` point to the last one.

    Returns for each run words with a code in each byte [N, C, 4], scales [N, C], and what is
    subtracted from the product of both [N, C], or 0. Codes begin at bit 0, those of the second
    run at bit RUNS[3]; other bits have no meaning.
    """
    if ENCODING == "q4_k" or ENCODING == "q5_k":
        first, second = _load_k_block(codes, k, ENCODING)
    elif ENCODING == "q2_k":
        first, second = _load_q2_k(codes, scales, others, row, k)
    elif ENCODING == "q3_k":
        first, second = _load_q3_k(codes, scales, others, row, span_n, k)
    elif ENCODING == "q6_k":
        first, second = _load_q6_k(codes, scales, others, row, span_n, k)
    else:
        first, second = _load_block(codes, scales, others, row, k, ENCODING)
    return first, second
