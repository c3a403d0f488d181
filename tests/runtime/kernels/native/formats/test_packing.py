"""Input rows as integers of 8 and of 15 bits, in every library: by hand, and any numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.runtime.kernels.native.library import Library
from tests.runtime.kernels.native.variants import LIBRARIES
from tests.runtime.kernels.packed import GROUP, equal, groups_of, pack, unpack
from tests.runtime.kernels.widths.formats import packed_by

EVERY = pytest.mark.parametrize("of", LIBRARIES, ids=lambda of: of.variant)


def one_group(of: Library, numbers: dict[int, float], planes: int) -> NDArray[np.void]:
    """Pack 32 inputs, those that are not 0 by their number."""
    x = torch.zeros(1, GROUP)
    for number, value in numbers.items():
        x[0, number] = value
    (group,) = groups_of(packed_by(of, x, planes), planes)
    return group


def normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@EVERY
def test_bytes_worked_out_by_hand(of: Library) -> None:
    """The largest input is 254, so the scale is 2; halves go to the even neighbour."""
    inputs = {0: 254, 1: -254, 2: 1, 3: 3, 4: -1, 5: -3, 15: 100, 16: 7, 30: 2.9, 31: -253}
    group = one_group(of, inputs, 1)
    assert group["scale"] == 2
    expected = {0: 127, 1: -127, 3: 2, 5: -2, 15: 50, 16: 4, 30: 1, 31: -126}
    assert group["bytes"][0].tolist() == [expected.get(i, 0) for i in range(GROUP)]
    assert group["sums"].tolist() == [2 * 50, 2 * (4 + 1 - 126)]


@EVERY
def test_two_planes_worked_out_by_hand(of: Library) -> None:
    """The largest input is 1.5, so the scale is 2^-13: 1.5 becomes 12288, which is 96 * 128."""
    unit = 2.0**-13
    inputs = {0: 1.5, 1: -1.5, 2: 129 * unit, 3: -unit, 4: unit / 2, 5: 1.5 * unit, 31: 0.5}
    group = one_group(of, inputs, 2)
    assert group["scale"] == unit
    high, low = {0: 96, 1: -96, 2: 1, 3: -1, 31: 32}, {2: 1, 3: 127, 5: 2}
    assert group["bytes"][0].tolist() == [high.get(i, 0) for i in range(GROUP)]
    assert group["bytes"][1].tolist() == [low.get(i, 0) for i in range(GROUP)]
    assert group["sums"].tolist() == [unit * (129 - 1 + 2), unit * 4096]


@EVERY
def test_fifteen_bits_hold_the_largest_number_below_a_power_of_two(of: Library) -> None:
    almost = float(np.nextafter(np.float32(2), np.float32(0)))
    group = one_group(of, {0: almost, 1: -almost}, 2)
    assert group["bytes"][:, 0].tolist() == [127, 127]  # 16383, not 16384
    assert group["bytes"][:, 1].tolist() == [-128, 0]


@EVERY
@pytest.mark.parametrize("planes", [1, 2])
def test_rows_of_every_size_have_the_bytes_of_the_reference(of: Library, planes: int) -> None:
    """Numbers of float32's whole range, and of one size each."""
    wide = normals(0, 40, 320) * torch.exp2(60 * normals(1, 40, 320)).clamp(2.0**-149, 2.0**120)
    sizes = torch.exp2(torch.arange(-149, 127.0))[:, None] * normals(2, 276, 64).clamp(-1.99, 1.99)
    for x in (wide.clamp(-3e38, 3e38), sizes, torch.zeros(2, 64), -torch.zeros(2, 64)):
        packed = packed_by(of, x, planes)
        assert equal(packed, pack(x, planes), planes)
        assert equal(packed_by(of, x[-1:], planes), packed[-1:], planes)


@EVERY
def test_no_byte_is_below_minus_127(of: Library) -> None:
    """Every group's largest input is negative, and its quotient by the scale may be above 127."""
    x = -normals(0, 500, 320).abs()
    bytes_ = groups_of(packed_by(of, x, 1), 1)["bytes"]
    assert bytes_.min() == -127
    assert (bytes_.min(axis=(1, 2)) == -127).all()
    assert bytes_.max() == 0


@EVERY
def test_an_error_is_at_most_half_a_step(of: Library) -> None:
    x = normals(0, 100, 320)
    for planes, steps in ((1, 127), (2, 8192)):
        largest = x.unflatten(1, (-1, GROUP)).abs().amax(2, keepdim=True)
        error = (unpack(packed_by(of, x, planes), planes) - x).unflatten(1, (-1, GROUP)).abs()
        assert bool((error <= 0.501 * largest / steps).all())
        assert error.max() > 0.3 * largest.min() / steps


@EVERY
def test_fifteen_bits_are_exact_for_bfloat16_within_a_factor_of_64(of: Library) -> None:
    x = normals(0, 100, 320).bfloat16().float()
    largest = x.unflatten(1, (-1, GROUP)).abs().amax(2).repeat_interleave(GROUP, 1)
    x[x.abs() < largest / 64] = 0
    assert torch.equal(unpack(packed_by(of, x, 2), 2), x.double())


@EVERY
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_a_number_that_is_not_finite_has_a_scale_of_nan(
    of: Library, planes: int, bad: float
) -> None:
    x = normals(0, 1, 96)
    x[0, 40] = bad
    groups = groups_of(packed_by(of, x, planes), planes)
    assert np.isnan(groups["scale"]).tolist() == [False, True, False]
    assert np.isnan(groups["sums"][1]).all()
