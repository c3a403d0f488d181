"""Kernels touch nothing beyond their arrays, whatever the width and the processor (widths/)."""

from __future__ import annotations

import pytest

from greenroom.runtime.kernels.dense.stored import product_scratch
from tests.runtime.kernels.codes import Style
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.widths.cases import CASES, Case, check_case, check_few
from tests.runtime.kernels.widths.formats import (
    ALL,
    BYTES,
    EVERY_STYLE,
    FEW,
    EncodedMatrix,
    check_style,
    unit_of,
)

FORMATS = [[name for name in of.symbols() if name.startswith("format_")] for of in LIBRARIES]
# What libraries export besides kernels. Cases of kernels take scratch memory of these sizes.
SIZES = {"rows_scratch_bytes", "expert_scratch_bytes"}
ABOUT_LIBRARY = {"pair_instruction", "runs_here", "source_digest"}
STRUCTURES = ("fields_of_", "bytes_of_")


@pytest.mark.parametrize("style", EVERY_STYLE, ids=lambda s: f"{s}-{s.share[1]}")
def test_formats_stay_within_rows_near_whole_vectors(style: Style) -> None:
    for blocks in FEW if unit_of(style) < 256 else FEW[:3]:
        check_style(style, blocks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", EVERY_STYLE, ids=lambda s: f"{s}-{s.share[1]}")
def test_formats_stay_within_rows_of_every_width(style: Style) -> None:
    for blocks in ALL:
        check_style(style, blocks)
        check_style(style, blocks, at_end=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_stay_within_arrays_near_whole_vectors(case: Case) -> None:
    check_few(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_stay_within_arrays_of_every_width(case: Case) -> None:
    for width in case.many:
        check_case(case, width)
        check_case(case, width, at_end=False)


def test_every_format_of_every_library_has_a_case() -> None:
    covered = set()
    for style in EVERY_STYLE:
        matrix = EncodedMatrix(style, 2 * unit_of(style))
        covered |= {*matrix.forms()}
    for names in FORMATS:
        assert set(names) == covered


def test_every_kernel_of_every_library_has_a_case() -> None:
    covered = set().union(*(case.symbols for case in CASES))
    for of, formats in zip(LIBRARIES, FORMATS, strict=True):
        names = {name for name in of.symbols() if not name.startswith(STRUCTURES)}
        assert names - {*formats} - SIZES - ABOUT_LIBRARY == covered


def test_callers_have_the_scratch_memory_that_products_take() -> None:
    """Beside it, attention has a row of float32 and a packed one (native/encoded.hpp)."""
    for of in LIBRARIES:
        bound = BYTES(of.address("rows_scratch_bytes"))
        for width in range(32, 9000, 32):
            assert 63 + 8 * width + bound(width) <= product_scratch(width)
