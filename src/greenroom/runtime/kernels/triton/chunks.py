"""Triton functions that read codes 16 bytes at a time, and make float32 of them.

16 bytes of a row's codes are a *chunk*.

A code becomes a float32 without a conversion. An integer code is shifted to the top of a mantissa,
below a constant exponent, whose value is then subtracted. A small float is shifted so that its
exponent and mantissa are those of a float32, whose exponent is too small by a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.kernels.triton.expand import e4m3, e8m0

# Weights in a chunk, of the encodings that are read so.
CHUNKS = {
    **dict.fromkeys(("int4", "mxfp4", "nvfp4", "ct_nvfp4", "q4_k", "q5_k"), 32),
    **dict.fromkeys(("symmetric4", "affine4"), 32),
    **dict.fromkeys(("int8", "fp8", "symmetric8", "affine8"), 16),
    **dict.fromkeys(("q4_0", "iq4_nl", "iq4_xs", "gguf_mxfp4", "q6_k"), 32),
    "q8_0": 16,
}
LEAST = {"q6_k": 128}  # inputs of a tile: four chunks, whose high halves are after all low ones
ZEROS = ("affine4", "affine8")  # encodings with a zero beside each scale
# Encodings whose weights are rounded to the type of their scales first.
AFFINE = ("symmetric4", "symmetric8", "signed8", *ZEROS)
# Masks of sign, exponent and mantissa within a float32, and half of what its exponent lacks.
E2M1, E4M3 = tl.constexpr(0x81C00000 - (1 << 32)), tl.constexpr(0x87F00000 - (1 << 32))
E2M1_HALF, E4M3_HALF = tl.constexpr(2.0**63), tl.constexpr(2.0**60)
# Of integer codes of 4, 5 and 8 bits: masks of mantissas, what is exclusive-ored with a code (an
# exponent, and the sign of int8), and what the float32 has more than the code.
FOUR, EIGHT, FIFTH = tl.constexpr(0x00780000), tl.constexpr(0x007F8000), tl.constexpr(0x00400000)
FOUR_OF_5, SIX = tl.constexpr(0x003C0000), tl.constexpr(0x007E0000)
_SIXTEEN, _THIRTY_TWO = tl.constexpr(0x41800000), tl.constexpr(0x42000000)
_SIXTY_FOUR = tl.constexpr(0x42800000)
_SIGNED, _UNSIGNED = tl.constexpr(0x43C00000), tl.constexpr(0x43800000)


@triton.jit
def exponent(ENCODING: tl.constexpr):
    """Return what is exclusive-ored with integer codes.

    The compiler does not know the number, since a program's id is 0 only at run time: so it keeps
    the number in a register, and does not move a constant there for each code.
    """
    if ENCODING == "symmetric8" or ENCODING == "affine8":
        number = _UNSIGNED ^ tl.program_id(2)
    elif (
        ENCODING == "int8" or ENCODING == "signed8" or ENCODING == "iq4_nl" or ENCODING == "iq4_xs"
    ):  # fmt: skip
        number = _SIGNED ^ tl.program_id(2)
    elif ENCODING == "q5_k":
        number = _THIRTY_TWO ^ tl.program_id(2)
    elif ENCODING == "q6_k":
        number = _SIXTY_FOUR ^ tl.program_id(2)
    else:
        number = _SIXTEEN ^ tl.program_id(2)
    return number


@triton.jit
def half(bits):
    """Take the lower 16 bits as a float16, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _moved(packed, BIT: tl.constexpr, TO: tl.constexpr):
    return packed >> (BIT - TO) if BIT > TO else packed << (TO - BIT)


@triton.jit
def integer(packed, flip, BIT: tl.constexpr, MASK: tl.constexpr):
    """Take the codes whose highest bit is BIT of the words, as float32.

    The result has 16 more than a code of 4 bits, 64 more than one of 6, 384 more than int8.
    """
    return ((_moved(packed, BIT, 22) & MASK) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def k_code(packed, fifth, flip, BIT: tl.constexpr, ENCODING: tl.constexpr):
    """Take codes of q4_k or q5_k: BIT of the words is the highest of four bits.

    The fifth bit is the lowest of the same byte in `fifth`. The result has 16 more than a code of
    q4_k, 32 more than one of q5_k.
    """
    if ENCODING == "q5_k":
        high = _moved(fifth, BIT // 8 * 8, 22) & FIFTH
        code = (((_moved(packed, BIT, 21) & FOUR_OF_5) | high) ^ flip).to(tl.float32, bitcast=True)
    else:
        code = integer(packed, flip, BIT, FOUR)
    return code


@triton.jit
def small_float(packed, BIT: tl.constexpr, MASK: tl.constexpr):
    """Take the float codes whose sign is BIT of the words, as scaled float32.

    Their values are divided by a power of two, the square of E2M1_HALF or E4M3_HALF. The codes of
    e4m3 that are no numbers are taken as 480.
    """
    top = packed << (31 - BIT)
    return ((top >> (6 if MASK == E2M1 else 4)) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def load_packed(codes, k):
    """Load chunks k [C] of rows, to which `codes` [N, 1, 1] point: [N, C, 4]."""
    return tl.load(codes + (k[:, None] * 4 + tl.arange(0, 4)[None, :])[None])


@triton.jit
def load_scales(scales, row, k, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Load the scales of chunks k [C] as float32: [N, C], where `row` [N, 1] begins."""
    # The compiler must not see that scales are consecutive: it would give a lane several, and
    # exchange them with other lanes through shared memory.
    if ENCODING == "mxfp4" or ENCODING == "gguf_mxfp4":  # 16 bits are two scales
        pairs = scales.to(tl.pointer_type(tl.int16))
        pair = tl.load(pairs + tl.max_contiguous(row // 2 + (k // 2)[None, :], (1, 1)))
        s = e8m0((pair.to(tl.int32) >> (k % 2 * 8)[None, :]) & 255)
    elif ENCODING == "iq4_xs":  # 64 bits: a float16, and eight scales of two and of four bits
        heads = scales.to(tl.pointer_type(tl.int64))
        head = tl.load(heads + tl.max_contiguous(row + (k // 8)[None, :], (1, 1)))
        low, four = head.to(tl.int32), (head >> 32).to(tl.int32) >> (k % 8 * 4)[None, :]
        six = (four & 15) | ((low >> (k % 8 * 2 + 12)[None, :]) & 48)
        s = half(low) * (six - 32).to(tl.float32)
    else:
        s = tl.load(scales + tl.max_contiguous(row + (k * CHUNK // GROUP)[None, :], (1, 1)))
        s = s.to(tl.float32)
    return s


@triton.jit
def surplus(others, row, k, ENCODING: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Return what integer codes of chunks k [C] have too much as float32: [N, C, 1], or a number.

    It is the value of the exponent and the code's zero. `others` points to zeros, if there are any.
    """
    if ENCODING == "affine4" or ENCODING == "affine8":
        group = k * CHUNK // GROUP  # 16 bits are two zeros
        pairs = others.to(tl.pointer_type(tl.int16))
        pair = tl.load(pairs + tl.max_contiguous(row // 2 + (group // 2)[None, :], (1, 1)))
        zero = (pair.to(tl.int32) >> (group % 2 * 8)[None, :]) & 255
        more = zero[:, :, None].to(tl.float32) + (16.0 if CHUNK == 32 else 256.0)
    elif ENCODING == "iq4_nl" or ENCODING == "iq4_xs":
        more = 384.0
    elif CHUNK == 32:
        more = 24.0
    else:
        more = 384.0
    return more


@triton.jit
def load_two_scales(scales, row, k):
    """Load both e4m3 scales of chunks k [C] of nvfp4 as float32: 2 [N, C]."""
    pairs = scales.to(tl.pointer_type(tl.int16))
    pair = tl.load(pairs + tl.max_contiguous(row // 2 + k[None, :], (1, 1))).to(tl.int32)
    return e4m3(pair & 255), e4m3((pair >> 8) & 255)


@triton.jit
def load_k_block(codes, k, ENCODING: tl.constexpr):
    """Load chunks k [C] of rows of q4_k or q5_k.

    `codes` [N, 1, 1] point to the rows.

    A block has SIZE words: both scales as float16, 12 bytes of the scales and minima of 8 groups,
    in q5_k 32 bytes of fifth bits, and 128 bytes of codes. A chunk has 16 codes of a group of 32
    weights in the low halves of its bytes, and 16 of the next group in the high ones.

    Returns the codes [N, C, 4], the fifth bits of the low and of the high codes in the lowest bits
    of bytes, and the low and high groups' scales and minima [N, C].
    """
    SIZE: tl.constexpr = 44 if ENCODING == "q5_k" else 36
    pair, first = k % 8 // 2, tl.max_contiguous(k // 8 * SIZE, 1)
    packed = load_packed(codes + (first + SIZE - 32)[None, :, None], k % 8)
    low_fifth, high_fifth = packed, packed
    if ENCODING == "q5_k":
        fifth = load_packed(codes + (first + 4)[None, :, None], k % 2)
        low_fifth = fifth >> (pair * 2)[None, :, None]
        high_fifth = fifth >> (pair * 2 + 1)[None, :, None]
    head = tl.max_contiguous(tl.reshape(codes, (codes.shape[0], 1)) + first[None, :], (1, 1))
    both, one, two, three = tl.load(head), tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    # Bytes 2 * pair and 2 * pair + 1 of eight: the groups' six bits.
    shift, early = (pair % 2 * 16)[None, :], (pair < 2)[None, :]
    one, two, three = one >> shift, two >> shift, three >> shift
    scale = tl.where(early, one & 0x3F3F, (three & 0x0F0F) | ((one >> 2) & 0x3030))
    least = tl.where(early, two & 0x3F3F, ((three >> 4) & 0x0F0F) | ((two >> 2) & 0x3030))
    s, m = half(both), half(both >> 16)
    low, high = s * (scale & 63).to(tl.float32), s * (scale >> 8).to(tl.float32)
    low_least, high_least = m * (least & 63).to(tl.float32), m * (least >> 8).to(tl.float32)
    return packed, low_fifth, high_fifth, low, high, low_least, high_least


@triton.jit
def load_q6_k(codes, scales, others, row, span_n, k):
    """Load chunks k [C] of rows of q6_k in the order of fields.

    `codes` [N, 1, 1] point to the rows, `row` [N, 1] are their first blocks. `others` points to the
    bytes of high pairs, `span_n` words further are scales, and `scales` are what multiplies these.

    A chunk has 16 codes of weights in the low halves of its bytes, and in the high ones those of
    weights that are 64 further.

    Returns words of bytes with codes of six bits, low and high ones [N, C, 4], under two bits of no
    meaning, and their scales [N, C].
    """
    pair_codes = others.to(tl.pointer_type(tl.int32))
    packed, j = load_packed(codes, k), k % 4
    pairs = load_packed(pair_codes + row[:, :, None] * 16, k // 4 * 2 + k % 2)
    pairs = pairs >> (j // 2 * 2)[None, :, None]
    low_codes = (packed & 0x0F0F0F0F) | ((pairs << 4) & -0x0F0F0F10)
    high_codes = ((packed >> 4) & 0x0F0F0F0F) | (pairs & -0x0F0F0F10)
    eights = (pair_codes + span_n).to(tl.pointer_type(tl.int64))
    eight = tl.load(eights + tl.max_contiguous(row * 2 + (k // 4)[None, :], (1, 1)))
    shift = (24 - j * 8)[None, :]
    low = (eight.to(tl.int32) << shift) >> 24
    high = ((eight >> 32).to(tl.int32) << shift) >> 24
    d = tl.load(scales + tl.max_contiguous(row + (k // 8)[None, :], (1, 1))).to(tl.float32)
    return low_codes, high_codes, d * low.to(tl.float32), d * high.to(tl.float32)
