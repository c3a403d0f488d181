"""Triton's kernels against eager and against their promises: interpreted, on tiny shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from greenroom.core.layout import BLOCKS, SlotLayout
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.segments import SegmentedExperts, SegmentedKernel
from greenroom.runtime.kernels.table import make_kernel
from greenroom.runtime.kernels.triton import TritonKernel, fallback_reason
from greenroom.runtime.kernels.triton.expand import ENCODINGS as ENCODINGS_OF_TRITON
from greenroom.runtime.kernels.triton.plan import plan_of
from greenroom.runtime.slots.block_fields import layout_in_fields
from greenroom.runtime.slots.cutting import Cutting
from tests.ggml_blocks import GGML, random_bytes, sane_scales
from tests.runtime.kernels.toys import (
    CLASSES,
    EXPERTS,
    ToySlots,
    compute,
    experts,
    inputs,
    layer_of,
    matrices,
)

pytestmark = pytest.mark.interpreted
BF16, FP16 = torch.bfloat16, torch.float16
WIDTH, INSIDE = 72, 40
LEFT = {"openai_privacy_filter"}  # computes in float32: eager's


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def small(family: str, dtype: torch.dtype = BF16) -> torch.nn.Module:
    """Experts whose sizes are no multiples of a program's outputs and inputs."""
    return experts(family, dtype, hidden=WIDTH, inner=INSIDE)


def some(tokens: int, dtype: torch.dtype = BF16, **options: Any) -> Any:
    return inputs(dtype, tokens, hidden=WIDTH, **options)


def many(dtype: torch.dtype = BF16, seed: int = 0) -> Any:
    """Tokens that all choose the same two experts: tiles of many entries, and few programs."""
    x, index, weights = some(20, dtype, top_k=2, seed=seed)
    index[:] = torch.tensor([4, 1])
    return x, index, weights


@pytest.mark.parametrize("family", CLASSES)
def test_triton_is_as_near_to_eager_as_grouped_mm(family):
    for dtype in (BF16, FP16) if family in ("qwen3_moe", "gpt_oss") else (BF16,):
        module = small(family, dtype)
        layer, places = layer_of(module)
        assert (fallback_reason(layer) is not None) == (family in LEFT)
        ours = theirs = 0.0
        for case in (some(1, dtype, top_k=2), many(dtype)):
            want = module(*case)
            module.config._experts_implementation = "grouped_mm"
            theirs = max(theirs, distance(module(*case), want))
            module.config._experts_implementation = "eager"
            got = compute(TritonKernel(), layer, places, *case)
            assert got.dtype == want.dtype
            ours = max(ours, distance(got, want))
        assert ours <= max(2 * theirs, torch.finfo(dtype).eps / 10)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4", "muse_spark"])
def test_groups_order_and_slots_do_not_change_a_bit(family):
    layer, places = layer_of(small(family))
    for case in (some(1, seed=3), many(seed=3)) if family == "qwen3_moe" else (some(1, seed=3),):
        want = compute(TritonKernel(), layer, places, *case)
        count = len(case[1].unique())
        for seed, groups in (
            (1, [[i] for i in range(count)][::-1]),
            (2, [[0], [*range(1, count)]]),
        ):
            other, slots = layer_of(small(family), seed=seed)
            assert torch.equal(compute(TritonKernel(), other, slots, *case, groups=groups), want)


def test_gate_weights_may_have_another_type():
    module = small("qwen3_moe")
    layer, places = layer_of(module)
    case = some(2, weights_dtype=torch.float32)
    assert distance(compute(TritonKernel(), layer, places, *case), module(*case)) < 2e-3


def test_foreign_experts_are_skipped():
    layer, places = layer_of(small("qwen3_moe"))
    x, index, weights = some(5)
    index[0, 1] = index[3] = EXPERTS
    got = compute(TritonKernel(), layer, places, x, index, weights)
    assert distance(got, compute(EagerKernel(), layer, places, x, index, weights)) < 2e-3
    assert torch.equal(got[3], torch.zeros_like(got[3]))
    index[:] = EXPERTS
    assert not compute(TritonKernel(), layer, places, x, index, weights).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate_as_in_eager(bad):
    layer, places = layer_of(small("gpt_oss"))
    x, index, weights = some(2, top_k=2)
    x[1, 0] = bad
    want = compute(EagerKernel(), layer, places, x, index, weights)
    got = compute(TritonKernel(), layer, places, x, index, weights)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[0].isfinite().all()


def test_the_eager_kernel_computes_float32_models():
    module = small("qwen3_moe", torch.float32)
    layer, places = layer_of(module)
    assert "float32" in str(fallback_reason(layer))
    case = some(4, torch.float32)
    assert torch.equal(compute(TritonKernel(), layer, places, *case), module(*case))


# ---- encoded experts: hidden and intermediate sizes are multiples of every block

HIDDEN, INNER = 64, 128
ENCODED = tuple(sorted(ENCODINGS_OF_TRITON - {"plain"}))


def sizes(name: str) -> tuple[int, int]:
    """Hidden and intermediate sizes, whole numbers of blocks."""
    return (256, 256) if BLOCKS[name][0] == 256 else (HIDDEN, INNER)


def parts_of(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Random codes, and companions of a useful size, as an encoding stores [rows, columns]."""

    def codes(n: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, n), dtype=torch.uint8)

    def scales(n: int) -> torch.Tensor:
        return (torch.rand(rows, n) / 400 + 1e-4).half()

    if name in GGML:
        random = np.random.default_rng(int(torch.randint(1 << 30, ())))
        block, nbytes = BLOCKS[name]
        blocks = random_bytes(name, rows * columns // block, random)
        sane_scales(name, blocks, random)
        return {"": torch.from_numpy(blocks.reshape(rows, columns // block * nbytes))}
    match name:
        case "int8":
            return {"": codes(columns).view(torch.int8), ".scale": scales(columns // 64)}
        case "int4":
            return {"": codes(columns // 2), ".scale": scales(columns // 32) * 10}
        case "mxfp4":
            power = torch.randint(116, 124, (rows, columns // 32), dtype=torch.uint8)
            return {"": codes(columns // 2), ".scale": power}
        case "nvfp4" | "ct_nvfp4":
            scale = torch.randint(1, 60, (rows, columns // 16), dtype=torch.uint8)
            matrices = torch.tensor([[0.03], [0.02]])
            if name == "ct_nvfp4":
                matrices = 1 / matrices
            kind = torch.float8_e4m3fn
            return {"": codes(columns // 2), ".scale": scale.view(kind), ".matrix_scale": matrices}
        case "fp8":
            values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            return {"": values, ".scale": torch.rand(rows // 32, columns // 32) / 20}
    raise AssertionError(name)


def encoded(
    family: str, name: str, fields: bool = False
) -> tuple[LayerExperts, list[int], LayerExperts, list[int]]:
    """Make random experts, encoded and as the decoder expands them.

    `fields`: blocks lie in the order of fields, where they can.
    """
    torch.manual_seed(4)
    hidden, inner = sizes(name)
    module = experts(family, BF16, hidden=hidden, inner=inner)
    up = "gate_up_proj"
    shapes = {up: (2 * inner, hidden), "down_proj": (hidden, inner)}
    each = [{p: parts_of(name, *shapes[p]) for p in shapes} for _ in range(EXPERTS)]
    tensors = [
        (p + suffix, tuple(t.shape), str(t.dtype)[6:])
        for p, parts in each[0].items()
        for suffix, t in parts.items()
    ]
    layout = SlotLayout.pack(tensors, dict.fromkeys(shapes, name), "bfloat16")
    layout = layout_in_fields(layout) if fields else layout
    slots, places = ToySlots(layout, EXPERTS + 2), [5, 0, 7, 2, 3, 6][:EXPERTS]
    plain: dict[str, list[torch.Tensor]] = {p: [] for p in shapes}
    for expert, slot in enumerate(places):
        for p, parts in each[expert].items():
            for suffix, tensor in parts.items():
                slots.put(slot, layout[p + suffix], tensor)
            w = ENCODINGS[name].decode(list(parts.values()), shapes[p], BF16)
            plain[p].append(w.T.contiguous() if module.is_transposed else w)
    stacked = {p: torch.stack(w) for p, w in plain.items()}
    return LayerExperts(module, layout, slots), places, *layer_of(module, stacked)


@pytest.mark.parametrize("name", ENCODED)
def test_an_encoding_has_the_bits_of_its_expanded_weights(name, monkeypatch):
    tile = 16, sizes(name)[0], 64, 4  # entries, outputs and inputs of a program, and its warps
    monkeypatch.setattr("greenroom.runtime.kernels.triton.kernel.FEW", tile)
    for family in ("qwen3_moe", "gpt_oss") if name == "mxfp4" else ("qwen3_moe",):
        layer, places, plain, where = encoded(family, name)
        assert fallback_reason(layer) is None
        case = inputs(BF16, 2, top_k=1, hidden=sizes(name)[0])
        case[1][:] = 3  # both tokens: the program for one entry does not round weights
        got = compute(TritonKernel(), layer, places, *case)
        assert got.isfinite().all()
        assert got.any()
        assert torch.equal(got, compute(TritonKernel(), plain, where, *case))
        assert distance(got, compute(EagerKernel(), layer, places, *case)) < 2e-3


def test_the_reason_names_an_unsupported_encoding():
    layer, *_ = encoded("qwen3_moe", "int8")
    layout = SlotLayout(
        layer.layout.tensors, layer.layout.nbytes, {"down_proj": "iq2_xxs"}, "bfloat16"
    )
    layer.down_weight = layer.down_weight.__class__(
        "down_proj", "iq2_xxs", layer.down_weight.shape, "bfloat16", layer.down_weight.parts
    )
    assert layout.encodings["down_proj"] == "iq2_xxs"
    assert fallback_reason(layer) == "experts in iq2_xxs"


def test_gate_and_up_of_different_types_are_left_to_eager():
    layer, *_ = encoded("qwen3_moe", "q4_0")
    up = layer.up_weight
    layer.up_weight = replace(up, encoding="q4_0+q8_0", parts=up.parts * 2)
    assert fallback_reason(layer) == "experts whose gate and up have different types"


def test_make_kernel_makes_the_triton_kernel():
    assert make_kernel("triton").name == "triton"


def test_tiles_have_the_offset_and_the_entries_of_each_expert():
    layer, places = layer_of(small("qwen3_moe"))
    x, index, weights = some(40)
    step = TritonKernel().begin(layer, x, Routing.of(index.numpy(), EXPERTS), weights)
    arguments = step.make_tiles([2, 4], [places[2], places[4]], layer)
    for expert in (2, 4):
        mine = arguments[arguments[:, 1] == expert]
        rows = step.routing.entries(expert)
        assert mine[0, 2] == rows.start
        assert mine[:, 3].sum() == rows.stop - rows.start
        assert (mine[:, 0] * 64 + layer.slots.address(0) == layer.slots.address(0)
                + places[expert] * layer.slots.stride).all()  # fmt: skip


# ---- segments, low-precision copies and skipped experts


def in_segments(
    module: torch.nn.Module, cut: int, stored: tuple[SlotLayout, dict[str, Any]] | None = None
) -> tuple[Any, list[int]]:
    """Experts in segments, the first `cut` in one pool of slots and the others in a second.

    `stored`: the layout of encoded experts, and their tensors
    """
    plain = matrices(module)
    layout, tensors = stored or (
        SlotLayout.pack([(k, tuple(t.shape[1:]), "bfloat16") for k, t in plain.items()]),
        plain,
    )
    cutting = Cutting.of(module, layout)
    cut_layout = layout_in_fields(cutting.segments(3, "toys"))
    segments = cut_layout.segments
    ends = [*(s.first for s in segments[1:]), cutting.channels]
    pools = [ToySlots(SlotLayout((), 1 << 17), EXPERTS) for _ in range(2)]
    for expert in range(EXPERTS):
        for number, (segment, end) in enumerate(zip(segments, ends, strict=True)):
            start = segment.offset - (segments[cut].offset if number >= cut else 0)
            for spec in segment.layout.tensors:
                at = replace(spec, offset=start + spec.offset)
                part = cutting.cut(
                    layout[spec.name], tensors[spec.name][expert], segment.first, end
                )
                pools[number >= cut].put(expert, at, part)
    return SegmentedExperts(module, cut_layout, pools, cut), [*range(EXPERTS)]


def computed_in_parts(layer: Any, groups: Any, case: Any) -> torch.Tensor:
    """Compute all tops of a group, then its bottoms, group by group."""
    kernel = SegmentedKernel(TritonKernel(), 2)
    x, index, weights = case
    step = kernel.begin(layer, x, Routing.of(index.numpy(), EXPERTS), weights)
    for group in groups:
        for part in (0, 1):
            kernel.compute_group(step, group, [2 * e + part for e in group], part)
    return kernel.combine(step)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4", "nemotron_h", "muse_spark"])
def test_segments_sum_to_the_bits_of_unsplit_experts(family):
    """An activation of the kernel, biases, the module's own, no gate, a norm after each expert."""
    module = experts(family, BF16, hidden=64, inner=192)
    whole, places = layer_of(module)
    for case in (inputs(BF16, 1, hidden=64), inputs(BF16, 20, top_k=2, hidden=64)):
        want = compute(TritonKernel(), whole, places, *case)
        eager = compute(EagerKernel(), whole, places, *case)
        chosen = case[1].unique().tolist()
        results = []
        for cut in (1, 2):
            layer, _ = in_segments(module, cut)
            assert fallback_reason(layer) is None
            for groups in ([chosen], [[e] for e in chosen[::-1]]):
                results.append(computed_in_parts(layer, groups, case))
        assert all(torch.equal(each, results[0]) for each in results[1:])
        bound = max(2 * distance(want, eager), torch.finfo(BF16).eps)
        assert distance(results[0], eager) <= bound
        assert distance(results[0], want) <= torch.finfo(BF16).eps


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "gguf_mxfp4"])
def test_segments_of_blocks_are_read_in_chunks(name):
    """Each segment's fields lie in arrays of their own."""
    torch.manual_seed(4)
    module = experts("qwen3_moe", BF16, hidden=64, inner=192)
    shapes = {"gate_up_proj": (384, 64), "down_proj": (64, 192)}
    tensors = {
        p: torch.stack([parts_of(name, *shape)[""] for _ in range(EXPERTS)])
        for p, shape in shapes.items()
    }
    sizes = [(p, tuple(each.shape[1:]), "uint8") for p, each in tensors.items()]
    layout = SlotLayout.pack(sizes, dict.fromkeys(shapes, name), "bfloat16")
    weights = {
        p: [ENCODINGS[name].decode([t], shapes[p], BF16) for t in tensors[p]] for p in shapes
    }
    plain, where = layer_of(module, {p: torch.stack(each) for p, each in weights.items()})
    layer, _ = in_segments(module, 1, (layout, tensors))
    for segment in (part for parts in layer.parts for part in parts):
        plan = plan_of(segment)
        assert plan.up.group
        assert plan.down.group
    for case in (inputs(BF16, 1, hidden=64), inputs(BF16, 20, top_k=2, hidden=64)):
        got = computed_in_parts(layer, [case[1].unique().tolist()], case)
        eager = compute(EagerKernel(), plain, where, *case)
        assert distance(got, eager) < torch.finfo(BF16).eps


def test_copies_and_skipped_experts():
    """Some experts from another pool of slots, in another encoding; some not at all."""
    module = experts("qwen3_moe", BF16, hidden=HIDDEN, inner=INNER)
    layer, places = layer_of(module)
    low, low_places, *_ = encoded("qwen3_moe", "int4")
    x, index, weights = inputs(BF16, 3, hidden=HIDDEN)
    chosen = index.unique().tolist()
    exact, copied, skipped = chosen[:-2], chosen[-2:-1], chosen[-1:]
    outputs = {}
    for kernel in (TritonKernel(), EagerKernel()):
        assert kernel.supports(low)
        step = kernel.begin(layer, x, Routing.of(index.numpy(), EXPERTS), weights)
        step.skip_experts(skipped)
        step.compute_from(copied, [low_places[e] for e in copied], low)
        step.compute_group(exact, [places[e] for e in exact])
        outputs[kernel.name] = kernel.combine(step)
    assert distance(outputs["triton"], outputs["eager"]) < 2e-3
    plain = compute(TritonKernel(), layer, places, x, index, weights)
    assert distance(outputs["triton"], plain) > 0.05
    step = TritonKernel().begin(layer, x, Routing.of(index.numpy(), EXPERTS), weights)
    step.skip_experts(chosen)
    assert not TritonKernel().combine(step).any()
