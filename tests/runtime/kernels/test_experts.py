"""The expert kernels against transformers' own eager forward, and against their promises."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.errors import UnknownName
from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.cpu_layer import layer_plan
from greenroom.runtime.kernels.eager import EagerKernel, UnweightedEagerKernel
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.table import KERNELS, make_kernel
from tests.runtime.kernels.toys import CLASSES, DTYPES, EXPERTS, compute, experts, inputs, layer_of

TOKENS = (1, 2, 3, 5, 33)
PLAIN = UnweightedEagerKernel()
HALF = [dtype for dtype in DTYPES if dtype != torch.float32]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("weights_dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", CLASSES)
def test_eager_has_the_bits_of_transformers(family, dtype, weights_dtype):
    module = experts(family, dtype)
    layer, places = layer_of(module)
    for tokens in TOKENS:
        case = inputs(dtype, tokens, weights_dtype=weights_dtype, seed=tokens)
        assert torch.equal(compute(EagerKernel(), layer, places, *case), module(*case))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", CLASSES)
def test_native_is_as_near_to_eager_as_grouped_mm(family, dtype):
    module = experts(family, dtype)
    layer, places = layer_of(module)
    ours = theirs = 0.0
    for tokens in TOKENS:
        case = inputs(dtype, tokens, seed=tokens)
        want = module(*case)
        module.config._experts_implementation = "grouped_mm"
        theirs = max(theirs, distance(module(*case), want))
        module.config._experts_implementation = "eager"
        ours = max(ours, distance(compute(CpuKernel(), layer, places, *case), want))
    unit = torch.finfo(dtype).eps
    # Some classes sum in float32, as grouped_mm does: it has eager's bits there, and no distance
    # to compare with. An eighth of a rounding unit is what a few other last bits come to.
    assert ours <= max(2 * theirs, unit / 8)


@pytest.mark.parametrize("family", CLASSES)
def test_float32_default_is_eager_and_native_is_near(family):
    module = experts(family, torch.float32)
    layer, places = layer_of(module)
    for tokens in TOKENS:
        case = inputs(torch.float32, tokens, seed=tokens)
        want = module(*case)
        assert torch.equal(compute(CpuKernel(), layer, places, *case), want)
        exact = experts(family, torch.float64)(
            *(t.double() if t.is_floating_point() else t for t in case)
        )
        got = compute(CpuKernel(float32=True), layer, places, *case)
        assert distance(got, exact) < 4e-7


def test_activations_are_recognised():
    names = {}
    for family in CLASSES:
        layer, _ = layer_of(experts(family, torch.bfloat16))
        names[family] = layer_plan(layer).activation
    called = {family for family, a in names.items() if a.code == 0}
    assert called == {"gemma4", "inkling2", "openai_privacy_filter"}
    assert (names["hy_v4"].limit, names["gpt_oss"].alpha) == (3.0, 1.702)


def groups_of(data: st.DataObject, count: int) -> list[list[int]]:
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else [])
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "gemma4"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_groups_order_and_slots_do_not_change_a_bit(family, name, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    module = experts(family, dtype)
    make = (lambda: CpuKernel(float32=True)) if name == "native" else EagerKernel
    case = inputs(dtype, data.draw(st.sampled_from(TOKENS)), seed=data.draw(st.integers(0, 99)))
    layer, places = layer_of(module)
    want = compute(make(), layer, places, *case)
    layer, places = layer_of(module, seed=data.draw(st.integers(1, 99)))
    groups = groups_of(data, len(case[1].unique()))
    assert torch.equal(compute(make(), layer, places, *case, groups=groups), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "aria", "nemotron_h", "gemma4"])
def test_an_expert_can_be_cut_at_any_block(family, dtype):
    """Pieces that hold 64 or 128 of 192 intermediate channels, one after another: same bits."""
    inner = 192
    module = experts(family, dtype, inner=inner)
    unsplit, places = layer_of(module)
    up_name = unsplit.up.name
    up, down = (getattr(module, name).data for name in (up_name, "down_proj"))
    pairs = 2 if unsplit.has_gate else 1
    for tokens in (1, 33):
        case = inputs(dtype, tokens)
        fused = CpuKernel(float32=True)
        want = compute(fused, unsplit, places, *case)
        for cuts in ([0, 64, 192], [0, 128, 192], [0, 64, 128, 192]):
            routing = Routing.of(case[1].numpy(), EXPERTS)
            step = fused.begin(unsplit, case[0], routing, case[2])
            for a, b in pairwise(cuts):
                axis = 2 if unsplit.transposed else 1
                shape = list(up.shape)
                if unsplit.interleaved or pairs == 1:
                    piece = up.narrow(axis, a * pairs, (b - a) * pairs)
                else:
                    shape[axis : axis + 1] = [2, inner]
                    piece = up.view(shape).narrow(axis + 1, a, b - a)
                    piece = piece.flatten(axis, axis + 1)
                bottom_part = down.narrow(1 if unsplit.transposed else 2, a, b - a)
                tensors = {up_name: piece.contiguous(), "down_proj": bottom_part.contiguous()}
                part, slots = layer_of(module, tensors, seed=7, first=a)
                step.compute_from(
                    routing.experts.tolist(), [slots[e] for e in routing.experts], part, a > 0
                )
            assert torch.equal(fused.combine(step), want), (tokens, cuts)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(family):
    layer, places = layer_of(experts(family, torch.bfloat16))
    x, index, weights = inputs(torch.bfloat16, 33)
    threads = torch.get_num_threads()
    want = compute(CpuKernel(), layer, places, x, index, weights)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(compute(CpuKernel(), layer, places, x, index, weights), want)
    finally:
        torch.set_num_threads(threads)
    sequential = [
        compute(CpuKernel(), layer, places, x[t:][:1], index[t:][:1], weights[t:][:1])
        for t in range(33)
    ]
    assert torch.equal(torch.cat(sequential), want)


@pytest.mark.parametrize("name", KERNELS)
def test_foreign_experts_are_skipped(name):
    module = experts("qwen3_moe", torch.bfloat16)
    layer, places = layer_of(module)
    x, index, weights = inputs(torch.bfloat16, 5)
    index[0, 1] = index[3] = EXPERTS
    got = compute(make_kernel(name), layer, places, x, index, weights)
    assert torch.equal(got, module(x, index, weights))
    assert torch.equal(got[3], torch.zeros_like(got[3]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "index",
    [[[2, EXPERTS, EXPERTS]], [[EXPERTS, 2, EXPERTS]], [[1, 2, EXPERTS]], [[2, 1, EXPERTS]],
     [[1, 2, 4], [EXPERTS] * 3], [[1, EXPERTS, EXPERTS], [4, 1, EXPERTS]]],
)  # fmt: skip
def test_a_gpu_gets_no_outputs_of_foreign_experts(family, index):
    """Identity experts, of LongCat, are some: `CpuStep.outputs_of` has rows of the others only."""
    layer, places = layer_of(experts(family, torch.bfloat16))
    x, _, weights = inputs(torch.bfloat16, len(index))
    routing = Routing.of(np.array(index), EXPERTS)
    chosen = routing.experts.tolist()
    steps = [kernel.begin(layer, x, routing, weights) for kernel in (CpuKernel(), PLAIN)]
    for step in steps:
        step.compute_from(chosen, [places[expert] for expert in chosen], layer)
    ours, theirs = (step.outputs_of(chosen) for step in steps)
    assert ours.shape == theirs.shape == (len(routing.rows), layer.hidden)
    assert distance(ours, theirs) < 0.02


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "aria"])
def test_nan_and_infinity_propagate_as_in_eager(family, dtype, bad):
    module = experts(family, dtype)
    x, index, weights = inputs(dtype, 3)
    x[1, 0] = bad
    layer, places = layer_of(module)
    want = module(x, index, weights)
    got = compute(CpuKernel(float32=True), layer, places, x, index, weights)
    assert not want[1].isfinite().all()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_the_error_for_an_unknown_kernel_lists_all_kernels():
    with pytest.raises(UnknownName, match="eager, native"):
        make_kernel("cuda")
