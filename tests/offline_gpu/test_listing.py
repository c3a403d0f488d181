"""Machine code is read as a person reads it: a fragment that was counted by hand."""

from __future__ import annotations

import re

import pytest

from tests.offline_gpu.listing import (
    Listing,
    count,
    lane_instructions,
    loaded_bytes,
    opcode,
    operation,
    read_functions,
    read_ptx,
    turns,
)

# A loop over chunks, which the assembler has unrolled once: each of its two turns loads 16 bytes of
# codes (32 weights of 4 bits) and 2 bytes of a scale. There are 15 instructions and a NOP from 0x20
# to the branch, for 64 weights. What stands outside must not be counted, nor the branch to itself
# at the end.
SASS = """
\t.headerflags\t@"EF_CUDA_64BIT_ADDRESS"
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/              @!P0 LDG.E.128 R8, desc[UR6][R2.64] ;
        /*0030*/                   LDG.E.U16 R12, desc[UR6][R14.64+0x2] ;
        /*0040*/                   LOP3.LUT R16, R8, 0x780000, R5, 0x6c, !PT ;
        /*0050*/                   FFMA R20, R16, R21, R20 ;
        /*0060*/                   HADD2.F32 R12, -RZ, R12.H0_H0 ;
        /*0070*/                   STL [R1], R20 ;
        /*0080*/                   LDG.E.128 R8, desc[UR6][R2.64+0x200] ;
        /*0090*/                   LDG.E.U16 R13, desc[UR6][R14.64+0x22] ;
        /*00a0*/                   NOP ;
        /*00b0*/                   LOP3.LUT R16, R8, 0x780000, R5, 0x6c, !PT ;
        /*00c0*/                   FFMA R20, R16, R21, R20 ;
        /*00d0*/                   IADD3 R2, P1, R2, 0x400, RZ ;
        /*00e0*/                   IMAD.X R3, RZ, RZ, R3, P1 ;
        /*00f0*/                   ISETP.GE.AND P0, PT, R2, UR4, PT ;
        /*0100*/              @!P0 LDL R20, [R1] ;
        /*0110*/              @!P0 BRA 0x20 ;
        /*0120*/                   STG.E desc[UR6][R2.64], R20 ;
        /*0130*/                   EXIT ;
        /*0140*/                   BRA 0x140;
"""
# The loop before the assembler unrolled it. Triton guards loads by predicates.
PTX = """
.visible .entry kernel(
\t.param .u64 kernel_param_0
)
{
\t.reg .pred \t%p<4>;
$L__BB0_1:
\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\t@%p1 ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
\tfma.rn.f32 \t%r5, %r6, %r7, %r5;
\t@%p2 bra \t$L__BB0_1;
\tst.global.b32 [ %rd3 + 0 ], { %r5 };
\tret;
}
"""


def sass_of(text: str) -> Listing:
    (listing,) = read_functions(text, [0x150])
    return listing


def test_functions_behind_one_another_are_divided():
    again = re.sub(r"(?<=/\*)[0-9a-f]{4}(?=\*/)", lambda at: f"{int(at[0], 16) + 0x150:04x}", SASS)
    again = again.replace("BRA 0x20 ", "BRA 0x170 ").replace("BRA 0x140;", "BRA 0x290;")
    first, second = read_functions(SASS + again, [0x150, 0x150])
    assert [len(each.instructions) for each in (first, second)] == [21, 21]
    assert first.loops == second.loops == (range(2, 18),)


def test_the_fragment_is_counted_as_by_hand():
    sass, ptx = sass_of(SASS), read_ptx(PTX)
    assert len(sass.instructions) == 21
    assert [len(loop) for loop in sass.loops] == [16]
    assert len(ptx.main_loop) == 4
    assert turns(sass, ptx) == 2
    assert lane_instructions(sass.main_loop, 2 * 32) == 15 / 64
    assert dict(loaded_bytes(sass.main_loop, "LDG")) == {16: 32, 2: 4}
    assert count(sass.in_loops, "LDL", "STL") == 2
    assert count(sass.instructions, "EXIT", "STG") == 2


def test_the_loop_of_the_products_is_the_main_one():
    """Code behind it jumps back, so a longer range has it too."""
    products, rest = "UTCHMMA gdesc[UR4], gdesc[UR6]", ("FADD R1, R2, R3",) * 9
    made = Listing((rest[0], products, products, *rest), (range(2), range(1, 3), range(12)))
    assert made.main_loop == (products, products)
    plain = Listing((*rest, rest[0]), (range(2), range(1, 9)))
    assert len(plain.main_loop) == 8
    assert Listing(rest, ()).main_loop == ()


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("@!P0 LDG.E.U8 R8, desc[UR6][R2.64]", "LDG.E.U8"),
        ("@UP1 UIADD3 UR4, UR4, 0x1, URZ", "UIADD3"),
        (
            "@%p9 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2",
            "cp.async.cg.shared.global",
        ),
        ("FADD R1, R2, R3", "FADD"),
    ],
)
def test_a_predicate_is_no_part_of_an_operation(instruction, name):
    assert opcode(instruction) == name
    assert operation(instruction) == name.split(".")[0]


def test_an_asynchronous_copy_is_a_wide_load():
    ptx = PTX.replace(
        "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ]",
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2",
    )
    sass = SASS.replace("LDG.E.128 R8", "LDGSTS.E.BYPASS.128 [R8]")
    assert turns(sass_of(sass), read_ptx(ptx)) == 2


def test_an_unrolled_loop_that_does_not_divide_is_refused():
    sass = sass_of(SASS)
    with pytest.raises(AssertionError):
        turns(sass, read_ptx(PTX.replace("ld.global.v4.b32", "ld.global.b8")))
    double = PTX.replace(
        "\tfma", "\t@%p1 ld.global.v2.b64 { %rd7, %rd8 }, [ %rd1 + 16 ];\n" * 2 + "\tfma"
    )
    with pytest.raises(AssertionError, match="2 of"):
        turns(sass, read_ptx(double))
