"""Blocks read off a conversion do what the conversion does, whatever it is made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.hf.index import blocks as module
from greenroom.hf.index.blocks import Block, find_blocks


def apply(found: list[Block], sources: list[np.ndarray], size: int) -> np.ndarray:
    """Element by element, as the docstring of Block says."""
    target = np.full(size, -1, dtype=np.int64)
    for block in found:
        source = sources[block.source].reshape(-1)
        for i in range(block.shape[0]):
            for j in range(block.shape[1]):
                s = block.source_start + i * block.source_strides[0] + j * block.source_strides[1]
                t = block.target_start + i * block.target_strides[0] + j * block.target_strides[1]
                assert target[t] == -1, "written twice"
                target[t] = source[s]
    return target


def numbered(shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    every = np.arange(sum(a * b for a, b in shapes))
    parts = np.split(every, np.cumsum([a * b for a, b in shapes])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def check(target: np.ndarray, sources: list[np.ndarray]) -> list[Block]:
    found = find_blocks(target, [source.size for source in sources])
    assert found is not None
    assert np.array_equal(apply(found, sources, target.size), target.reshape(-1))
    return found


A, B = numbered([(6, 4), (6, 4)])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (A, 1),
        (A.T, 1),
        (np.concatenate([A, B]), 2),  # gate above up
        (np.concatenate([A, B], axis=1), 2),  # gate beside up
        (np.concatenate([A.T, B.T], axis=1), 2),
        (np.stack([A, B], axis=1).reshape(12, 4), 2),  # gate and up row by row
        (np.stack([A, B], axis=2).reshape(6, 8), 2),  # gate and up element by element
        (A[::2], 1),
        (A[:, :2], 1),
        (np.concatenate([A[::2], A[1::2]]), 2),  # deinterleaved
    ],
)
def test_known_layouts_take_few_blocks(target: np.ndarray, expected: int) -> None:
    sources = [A, B] if target.max() >= A.size else [A]
    assert len(check(target, sources)) == expected


def test_one_run_of_bytes_is_seen_as_one() -> None:
    (block,) = check(A, [A])
    assert block.shape == (1, 24)
    assert block.source_strides == block.target_strides == (24, 1)


@given(st.data())
def test_any_chain_of_conversions(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)) * 2, data.draw(st.integers(1, 4)) * 2
    sources = numbered([(rows, columns)] * data.draw(st.integers(1, 3)))
    x = np.concatenate(sources, axis=data.draw(st.sampled_from([0, 1])))
    for op in data.draw(st.lists(st.sampled_from("tihc"), max_size=3)):
        axis = data.draw(st.sampled_from([0, 1]))
        n = x.shape[axis]
        if op == "t":
            x = x.T
        elif op == "i" and n % 2 == 0:
            x = np.take(x, np.arange(n).reshape(2, -1).T.reshape(-1), axis)
        elif op == "h" and n % 2 == 0:
            x = np.take(x, np.arange(n).reshape(-1, 2).T.reshape(-1), axis)
        elif op == "c" and n % 2 == 0:
            x = np.split(x, 2, axis)[data.draw(st.sampled_from([0, 1]))]
    check(np.ascontiguousarray(x), sources)


@given(st.permutations(range(24)))
def test_any_permutation(order: list[int]) -> None:
    check(np.array(order)[None], [A])


def test_a_permutation_is_refused_where_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 16)
    target = np.random.default_rng(0).permutation(10_000)
    assert find_blocks(target[None], [10_000]) is None
    assert find_blocks(target.reshape(100, 100), [10_000]) is None


def test_numbers_that_are_no_rows_and_columns_are_refused() -> None:
    target = A.copy()
    target[3, 2], target[4, 3] = target[4, 3], target[3, 2]
    assert find_blocks(target, [A.size]) is None


def test_an_interleaved_expert_of_real_size_is_quick() -> None:
    rows = np.arange(2 * 1024 * 512, dtype=np.int32).reshape(2048, 512)
    target = np.concatenate([rows[::2], rows[1::2]])
    found = find_blocks(target, [target.size])
    assert found is not None
    assert [block.shape for block in found] == [(1024, 512), (1024, 512)]
