"""The default: weights as their format says, multiplied as integers where that works."""

from __future__ import annotations

import pytest
import torch

from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.table import make_kernel
from tests.runtime.kernels.codes import STYLES, Coded, Style, planes_of
from tests.runtime.kernels.native.formats.test_encoded import BY_NAME, sizes
from tests.runtime.kernels.toys import compute, experts, inputs

TOKENS = (1, 3, 33)
# Distances of experts from those with float32 inputs, by planes.
NEAR = {0: 1e-5, 1: 0.03, 2: 3e-4}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def coded(style: Style, dtype: torch.dtype = torch.float32, seed: int = 0) -> Coded:
    hidden, inner = sizes(style)
    return Coded(experts("qwen3_moe", dtype, hidden, inner), style, style, seed)


@pytest.mark.parametrize("kernels", ["native", "precise"])
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_results_are_near_those_of_unrounded_weights(style: Style, kernels: str) -> None:
    """Experts of float32 models: their decoder's weights are not rounded either."""
    case, planes = coded(style), planes_of(style, kernels)
    for tokens in TOKENS:
        args = inputs(torch.float32, tokens, hidden=case.layer.hidden, seed=tokens)
        want = compute(CpuKernel(float32=True), case.plain, case.places, *args)
        got = compute(CpuKernel(kernels, float32=True), case.layer, case.places, *args)
        assert distance(got, want) < NEAR[planes]
    assert {m.planes for m in layer_plan(case.layer, kernels).matrices} == {planes}


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_bits_do_not_depend_on_threads_groups_slots_and_batches(style: Style) -> None:
    case = coded(style, torch.bfloat16)
    args = inputs(torch.bfloat16, 12, hidden=case.layer.hidden)
    want = compute(CpuKernel(), case.layer, case.places, *args)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(compute(CpuKernel(), case.layer, case.places, *args), want)
    finally:
        torch.set_num_threads(threads)
    groups = [[2], [5, 0, 1], [4, 3]]
    assert torch.equal(compute(CpuKernel(), case.layer, case.places, *args, groups=groups), want)
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 12)):
        got = compute(CpuKernel(), case.layer, case.places, *(part[start:stop] for part in args))
        assert torch.equal(got, want[start:stop])


@pytest.mark.parametrize("name", ["mxfp4-uint8", "gguf_mxfp4"])
def test_weights_of_the_models_type_are_as_near_to_eager(name: str) -> None:
    """Powers of two times four bits need no rounding: only sums differ from eager's."""
    case = coded(BY_NAME[name], torch.bfloat16)
    for tokens in TOKENS:
        args = inputs(torch.bfloat16, tokens, hidden=case.layer.hidden, seed=tokens)
        want = compute(EagerKernel(), case.layer, case.places, *args)
        assert distance(compute(CpuKernel("precise"), case.layer, case.places, *args), want) < 2e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_nan_or_infinite_makes_all_outputs_nan(bad: float) -> None:
    case = coded(BY_NAME["int4-float16"], torch.bfloat16)
    args = inputs(torch.bfloat16, 1, hidden=case.layer.hidden)
    args[0][0, 5] = bad
    assert compute(CpuKernel(), case.layer, case.places, *args).isnan().all()


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-60, 2.0**60])
def test_rows_of_small_or_large_inputs_are_equally_precise(size: float) -> None:
    """Neighbours share a power of two: rows that are all small or all large keep their bits."""
    style = BY_NAME["int4-float16"]
    case = coded(style)
    args = inputs(torch.float32, 1, hidden=case.layer.hidden)
    x = args[0] * size
    want = compute(CpuKernel(float32=True), case.plain, case.places, x, *args[1:])
    got = compute(CpuKernel(float32=True), case.layer, case.places, x, *args[1:])
    if size > 1:
        assert distance(got / size**2, want / size**2) < 3e-4
    else:
        assert (got - want).norm() <= 3e-4 * want.norm() + 1e-44


def test_both_cpu_kernels_can_compute_one_layer_in_turn() -> None:
    case = coded(BY_NAME["int8-float16"], torch.bfloat16)
    args = inputs(torch.bfloat16, 1, hidden=case.layer.hidden)
    want = compute(CpuKernel("rounded"), case.plain, case.places, *args)
    unrounded = compute(make_kernel("native"), case.layer, case.places, *args)
    assert not torch.equal(unrounded, want)
    assert torch.equal(compute(make_kernel("rounded"), case.layer, case.places, *args), want)
