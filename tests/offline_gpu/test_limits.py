"""Triton's kernels, compiled without a GPU, against the limits of their machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import triton

from tests.offline_gpu.examine import excesses
from tests.offline_gpu.findings import Findings
from tests.offline_gpu.launches import ALL, RARE, Launch, architectures
from tests.offline_gpu.limits import exceptions, measures

# Architectures that share what the compiler makes of programs of few rows, so one process has them.
SHARING = {"80, 89, 90": (80, 89, 90), "100, 120": (100, 120)}
OFTEN_USED = [encoding for encoding in ALL if encoding not in RARE]
# The disassembler takes longer to start than to read a function, so a case has several encodings.
CASES = [
    (which, encodings)
    for which, of in SHARING.items()
    for kind, size in ((OFTEN_USED, 2), (sorted(RARE), 4))
    for encodings in (kind[at : at + size] for at in range(0, len(kind), size))
    if set(of) & set(architectures(encodings[0]))
]


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "encodings"), CASES)
def test_machine_code_is_within_its_limits(which, encodings):
    """Getting worse than an exception fails, and so does an exception that nothing needs."""
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    found, allowed = excesses(encodings, SHARING[which]), exceptions()
    worse = {key: value for key, value in found.items() if value > allowed.get(key, 0)}
    assert not worse, "above the limit, or above the exception in exceptions.txt"
    of = {key for key in allowed if key[0] in encodings and key[1] in SHARING[which]}
    assert not of - set(found), "within the limit: delete it from exceptions.txt"


def test_exceptions_are_of_encodings():
    assert {encoding for encoding, *_ in exceptions()} <= {*ALL}


def exceeded(found: Findings, architecture: int, **options: int) -> set[str]:
    label = "many up" if "M" in options else "one up"
    launch = Launch(label, "int8", None, (), options)
    each = measures(launch, found, architecture)
    return {name for name, value, limit in each if value > limit}


ONE = Findings(
    registers=96, shared=0, threads=256, spills=0, byte_loads=0, wide_bytes=64, double_bytes=32,
    copied_bytes=0, code_bytes=64, input_bytes=32, tensor_cores=(), lane_instructions=4.0,
)  # fmt: skip
MANY = replace(
    ONE, threads=128, wide_bytes=96, double_bytes=0, copied_bytes=96, tensor_cores=("HMMA",)
)


def test_wide_loads_of_inputs_are_not_those_of_codes():
    assert not exceeded(ONE, 80)
    assert exceeded(replace(ONE, double_bytes=0), 80) == {"code bytes in narrow loads"}


def test_all_bytes_of_a_stage_are_copied_asynchronously():
    stages = {"M": 64, "num_stages": 3}
    assert not exceeded(MANY, 80, **stages)
    lacking = {"bytes in other than wide asynchronous copies"}
    assert exceeded(replace(MANY, copied_bytes=80), 80, **stages) == lacking


def test_large_tiles_have_the_products_of_their_architecture():
    stages, missing = {"M": 128, "num_stages": 3}, {"products without tensor cores"}
    for architecture, operation in ((90, "HGMMA"), (100, "UTCHMMA")):
        assert exceeded(MANY, architecture, **stages) == missing
        found = replace(MANY, tensor_cores=(operation,))
        assert not exceeded(found, architecture, **stages)


def test_a_tile_of_64_rows_leaves_registers_to_a_second_program():
    wide = replace(MANY, registers=255, threads=256)
    names = exceeded(wide, 80, M=64, num_stages=3)
    assert names == {"registers of the programs of a multiprocessor"}
    assert not exceeded(wide, 80, M=128, num_stages=3)
