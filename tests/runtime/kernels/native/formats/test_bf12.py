"""Products of bf12 have the bits of bfloat16, and damaged bytes harm nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenroom.runtime.kernels.cpu import CpuKernel
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.routing import Routing
from tests.runtime.kernels.codes import Coded, Style
from tests.runtime.kernels.native.variants import PAIR_FORMS, pair_form
from tests.runtime.kernels.toys import EXPERTS, compute, experts, inputs

BF12 = Style("bf12", share=(1, 1 << 20))
FORMS = PAIR_FORMS[library().variant]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "inner"), [(32, 64), (96, 160), (192, 96), (256, 320)])
def test_any_number_of_tokens_has_the_bits_of_bfloat16(hidden, inner, form) -> None:
    coded = Coded(experts("qwen3_moe", torch.bfloat16, hidden, inner), BF12, BF12, seed=hidden)
    kernel = CpuKernel("native")
    with pair_form(library(), form):
        for tokens in (1, 2, 3, 5, 17, 40):
            case = inputs(torch.bfloat16, tokens, hidden=hidden, seed=tokens)
            want = compute(kernel, coded.plain, coded.places, *case)
            assert want.abs().max() > 0
            assert torch.equal(compute(kernel, coded.layer, coded.places, *case), want)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_lists_change_nothing_but_products(seed: int) -> None:
    """Ends and columns are taken from outside of their tensors, and descend."""
    coded = Coded(experts("qwen3_moe", torch.bfloat16, 96, 160), BF12, BF12)
    random = np.random.default_rng(seed)
    layer = coded.layer
    for slot in coded.places:
        for weight in (layer.up_weight, layer.down_weight):
            for part, low, high in zip(
                weight.parts[1::2], (-(2**31), -(2**31)), (2**31, 2**31), strict=True
            ):
                tensor = layer.slots.tensor(slot, part)
                if seed % 2 and part.name.endswith("ends"):
                    low, high = 0, 17
                tensor.copy_(torch.from_numpy(random.integers(low, high, tensor.shape)))
    kernel = CpuKernel("native")
    for tokens in (1, 2, 20):
        case = inputs(torch.bfloat16, tokens, hidden=96, seed=tokens)
        assert compute(kernel, layer, coded.places, *case).shape == (tokens, 96)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("exact", ["plain", "bf12"])
def test_low_precision_copies_take_the_inputs_of_pairs(exact: str, tokens: int) -> None:
    """A step of bfloat16 pairs, some of whose experts are computed from int8 copies."""
    module = experts("qwen3_moe", torch.bfloat16, 128, 192)
    int8 = Style("int8", "float16", (1, 64))
    low = Coded(module, int8, int8)
    layer = low.plain if exact == "plain" else Coded(module, BF12, BF12).layer
    kernel = CpuKernel("native")
    x, index, weights = inputs(torch.bfloat16, tokens, hidden=128, seed=tokens)
    routing = Routing.of(index.numpy(), EXPERTS)
    numbers = routing.experts.tolist()
    slots = [low.places[expert] for expert in numbers]
    step = kernel.begin(layer, x, routing, weights)
    alone = kernel.begin(low.layer, x, routing, weights)
    step.compute_from(numbers, slots, low.layer)
    alone.compute_group(numbers, slots)
    assert torch.equal(step.combine(), alone.combine())
