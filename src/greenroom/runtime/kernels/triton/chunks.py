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

# GGUF types whose chunks have two runs (runs.py): bits of a code; runs from a chunk's first run to
# its second one; what the float32 of a code has more than the value, 2^bits and the code of zero
# (types with minima have no such code); bits from the first run's codes to those of the second in
# the words that are loaded.
RUNS = {
    "q4_1": (4, 1, 16, 4),
    "q5_0": (5, 1, 48, 0),
    "q5_1": (5, 1, 32, 0),
    "q2_k": (2, 2, 4, 2),
    "q3_k": (3, 2, 12, 0),
    "q4_k": (4, 2, 16, 4),
    "q5_k": (5, 2, 32, 0),
    "q6_k": (6, 4, 96, 0),
}
NO_RUNS = 0, 1, 0, 0
# Weights in a chunk, of the encodings that are read so.
CHUNKS = {
    **dict.fromkeys(("int4", "mxfp4", "nvfp4", "ct_nvfp4", "symmetric4", "affine4"), 32),
    **dict.fromkeys(("int8", "fp8", "symmetric8", "affine8", "q8_0"), 16),
    **dict.fromkeys(("q4_0", "iq4_nl", "iq4_xs", "gguf_mxfp4", *RUNS), 32),
}
# Inputs of a tile: a multiple of those of chunks that are neighbours and have all first runs before
# all second ones.
LEAST = {name: 32 * stride for name, (_, stride, *_) in RUNS.items()}
ZEROS = ("affine4", "affine8")  # encodings with a zero beside each scale
# Encodings whose weights are rounded to the type of their scales first.
AFFINE = ("symmetric4", "symmetric8", "signed8", *ZEROS)
# Masks of sign, exponent and mantissa within a float32, and half of what its exponent lacks.
E2M1, E4M3 = tl.constexpr(0x81C00000 - (1 << 32)), tl.constexpr(0x87F00000 - (1 << 32))
E2M1_HALF, E4M3_HALF = tl.constexpr(2.0**63), tl.constexpr(2.0**60)
# Of integer codes of 4 and 8 bits: masks of mantissas, and what is exclusive-ored with a code (an
# exponent, and the sign of int8).
FOUR, EIGHT = tl.constexpr(0x00780000), tl.constexpr(0x007F8000)
_SIXTEEN, _SIGNED = tl.constexpr(0x41800000), tl.constexpr(0x43C00000)
_UNSIGNED = tl.constexpr(0x43800000)


@triton.jit
def exponent(ENCODING: tl.constexpr, RUNS: tl.constexpr):
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
    elif RUNS[0] > 0:
        number = ((127 + RUNS[0]) << 23) ^ tl.program_id(2)
    else:
        number = _SIXTEEN ^ tl.program_id(2)
    return number


@triton.jit
def half(bits):
    """Take the lower 16 bits as a float16, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


if triton.knobs.runtime.interpret:  # the interpreter has no instructions of a GPU

    @triton.jit
    def four_halves(packed):
        """Take integers of 64 bits as four float16 each, lowest bits first, as float32."""
        low, high = packed.to(tl.int32), (packed >> 32).to(tl.int32)
        return half(low), half(low >> 16), half(high), half(high >> 16)

else:
    # Conversions read both halves of a register. The compiler alone would shift upper ones first.
    _FOUR = tl.constexpr("""{
        .reg .b16 a, b, c, d;
        mov.b64 {a, b, c, d}, $4;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
    }""")

    @triton.jit
    def four_halves(packed):
        """Take integers of 64 bits as four float16 each, lowest bits first, as float32."""
        return tl.inline_asm_elementwise(
            _FOUR, "=f,=f,=f,=f,l", [packed],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _moved(packed, BIT: tl.constexpr, TO: tl.constexpr):
    return packed >> (BIT - TO) if BIT > TO else packed << (TO - BIT)


@triton.jit
def integer(packed, flip, BIT: tl.constexpr, MASK: tl.constexpr):
    """Take the codes whose highest bit is BIT of the words, as float32.

    The result has 2^n more than a code of n bits, 384 more than int8.
    """
    return ((_moved(packed, BIT, 22) & MASK) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def run_code(packed, flip, BIT: tl.constexpr, RUNS: tl.constexpr):
    """Take the codes that begin at BIT of words, as float32."""
    BITS: tl.constexpr = RUNS[0]
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    return integer(packed, flip, BITS - 1 + BIT, MASK)


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
