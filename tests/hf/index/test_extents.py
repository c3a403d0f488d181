"""Byte ranges of experts: slices of fused tensors, by arithmetic and one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.layout import Copy
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.extents import between, extents_of
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.gguf_models import write


def contiguous(nbytes: int, target: int) -> list[Copy]:
    return [Copy(0, target, (1, nbytes), (nbytes, 1), (nbytes, 1), "uint8", "uint8")]


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 3000), st.integers(0, 5000)),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_extents_of_slices_follow_from_the_first_and_the_last(
    experts: int, sizes: list[tuple[int, int, int]], random: Any
) -> None:
    """`sizes` are (file, bytes of a slice, gap before the stack) of each fused tensor."""
    stacks, end = [], {0: 0, 1: 0}
    for file, nbytes, gap in sizes:
        stacks.append(
            StoredTensor(file, "uint8", (experts, nbytes), end[file] + gap, experts * nbytes)
        )
        end[file] += gap + experts * nbytes
    random.shuffle(stacks)
    starts = [sum(s.shape[1] for s in stacks[:i]) for i in range(len(stacks))]
    plans = [contiguous(s.shape[1], at) for s, at in zip(stacks, starts, strict=True)]
    shared: dict[Any, tuple[Copy, ...]] = {}
    table = [extents_of([s[e] for s in stacks], plans, shared) for e in range(experts)]
    assert between(table[0], table[-1], experts) in (table, None)
    if len({s.shape[1] for s in stacks}) == 1:  # all distances are the same in all experts
        assert between(table[0], table[-1], experts) == table


def test_slices_of_fused_experts_are_not_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf", "qwen3_moe", {"": "Q8_0"})
    slices: list[int] = []
    original = StoredTensor.__getitem__
    monkeypatch.setattr(
        StoredTensor, "__getitem__", lambda s, e: slices.append(e) or original(s, e)
    )
    catalog = ModelSkeleton.of(path).catalog
    assert catalog.experts_per_layer == (8, 8, 8)
    assert set(slices) == {0, 7}
    assert len(slices) <= 3 * 3 * 8  # 3 layers of 3 tensors, each at most 8 times
