from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from greenroom.core.layout import SlotLayout
from greenroom.errors import UnsupportedModel
from greenroom.runtime.slots.cutting import Cutting

HIDDEN, INNER = 128, 320


def module(transposed: bool = False, has_gate: bool = True, concatenated: bool = True):
    return SimpleNamespace(
        is_transposed=transposed, has_gate=has_gate, is_concatenated=concatenated
    )


def layout(transposed: bool = False, gate: int = 2) -> SlotLayout:
    shapes = [(gate * INNER, HIDDEN), (HIDDEN, INNER)]
    if transposed:
        shapes = [shape[::-1] for shape in shapes]
    name = "gate_up_proj" if gate == 2 else "up_proj"
    return SlotLayout.pack(
        [(name, shapes[0], "bfloat16"), ("down_proj", shapes[1], "bfloat16")], dtype="bfloat16"
    )


CASES = [
    (module(), layout()),
    (module(transposed=True), layout(transposed=True)),
    (module(concatenated=False), layout()),
    (module(has_gate=False), layout(gate=1)),
]


@pytest.mark.parametrize(("of", "unsplit"), CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 99])
def test_cut_tensors_join_to_the_original(of, unsplit, count):
    cutting = Cutting.of(of, unsplit)
    segments = cutting.segments(count, "layer")
    assert cutting.channels == INNER
    assert len(segments.segments) == min(count, 5)
    assert all(segment.first % 64 == 0 for segment in segments.segments)
    assert segments.nbytes == sum(segment.layout.nbytes for segment in segments.segments)
    ends = [*(segment.first for segment in segments.segments[1:]), INNER]
    for spec in unsplit.tensors:
        tensor = torch.arange(spec.nbytes // 2).view(spec.shape)
        parts = [
            cutting.cut(spec, tensor, segment.first, end)
            for segment, end in zip(segments.segments, ends, strict=True)
        ]
        for part, segment in zip(parts, segments.segments, strict=True):
            assert tuple(part.shape) == segment.layout[spec.name].shape
        assert torch.equal(cutting.join(spec, parts), tensor)


def test_gate_and_up_keep_together():
    """Segment 1 has channels 64..128 of the gate, then of up."""
    cutting = Cutting.of(module(), layout())
    rows = torch.arange(2 * INNER)[:, None].expand(2 * INNER, HIDDEN)
    part = cutting.cut(layout().tensors[0], rows, 64, 128)
    assert part[:, 0].tolist() == [*range(64, 128), *range(INNER + 64, INNER + 128)]


def test_encodings_are_cut_where_their_blocks_end():
    def encoded(inner: int) -> SlotLayout:
        codes = [("up_proj", (inner, HIDDEN // 256 * 144 or 144), "uint8"),
                 ("down_proj", (HIDDEN, inner // 256 * 144), "uint8")]  # fmt: skip
        return SlotLayout.pack(codes, {"up_proj": "q4_k", "down_proj": "q4_k"}, "bfloat16")

    of = module(has_gate=False)
    segments = Cutting.of(of, encoded(768)).segments(8, "layer")
    assert [segment.first for segment in segments.segments] == [0, 256, 512]
    with pytest.raises(
        UnsupportedModel, match=r"have 256 intermediate channels: .* only at multiples of 256"
    ):
        Cutting.of(of, encoded(256)).segments(8, "layer")


def test_scales_of_blocks_are_cut_with_them():
    specs = [
        ("up_proj", (384, HIDDEN), "float8_e4m3fn"), ("up_proj.scale", (3, 1), "float32"),
        ("down_proj", (HIDDEN, 384), "float8_e4m3fn"), ("down_proj.scale", (1, 3), "float32"),
    ]  # fmt: skip
    unsplit = SlotLayout.pack(specs, {"up_proj": "fp8", "down_proj": "fp8"}, "bfloat16")
    segments = Cutting.of(module(has_gate=False), unsplit).segments(8, "layer")
    assert [segment.first for segment in segments.segments] == [0, 128, 256]
    assert segments.segments[1].layout["down_proj.scale"].shape == (1, 1)
