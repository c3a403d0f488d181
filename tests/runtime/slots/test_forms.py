"""Forms of AWQ, GPTQ and compressed-tensors are arranged as rows, element by element."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from greenroom.errors import StoreError
from greenroom.runtime.slots.forms import FORMS, ORDER, arrange

ROWS, WIDTH = 72, 5


def element(words: np.ndarray, bits: int, place: int) -> np.ndarray:
    return words >> (bits * place) & ((1 << bits) - 1)


def gptq(bits: int, minus: int) -> Callable[[np.ndarray, int, int], int]:
    per = 32 // bits

    def zero(words: np.ndarray, row: int, group: int) -> int:
        return int(element(words[group, row // per], bits, row % per) + minus) % (1 << bits)

    return zero


def rows(bits: int) -> Callable[[np.ndarray, int, int], int]:
    per = 32 // bits
    return lambda words, row, group: int(element(words[row // per, group], bits, row % per))


def awq(words: np.ndarray, row: int, group: int) -> int:
    return int(element(words[group, row // 8], 4, ORDER.index(row % 8)))


ZEROS: dict[str, tuple[tuple[int, int], Callable[[np.ndarray, int, int], int]]] = {
    "zeros4": ((WIDTH, ROWS // 8), gptq(4, 0)),
    "zeros8": ((WIDTH, ROWS // 4), gptq(8, 0)),
    "zeros4-minus-1": ((WIDTH, ROWS // 8), gptq(4, 1)),
    "zeros8-minus-1": ((WIDTH, ROWS // 4), gptq(8, 1)),
    "zeros4-awq": ((WIDTH, ROWS // 8), awq),
    "rows4": ((ROWS // 8, WIDTH), rows(4)),
    "rows8": ((ROWS // 4, WIDTH), rows(8)),
}


def random_words(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 32, shape, np.uint32)


def test_every_form_is_tried() -> None:
    assert {*FORMS} == {*ZEROS, "transposed", "awq"}


@pytest.mark.parametrize("form", ZEROS)
def test_zeros(form: str) -> None:
    shape, zero = ZEROS[form]
    words = random_words(shape)
    target = np.zeros((ROWS, WIDTH + 2), np.int8)  # rows of a slot may be longer
    arrange(form, words.view(np.uint8).reshape(-1), target[:, :WIDTH])
    want = [[zero(words, row, group) for group in range(WIDTH)] for row in range(ROWS)]
    assert (target[:, :WIDTH].view(np.uint8) == want).all()
    assert not target[:, WIDTH:].any()


@pytest.mark.parametrize("kind", [np.int16, np.int32])
def test_turned(kind: type) -> None:
    source = random_words((WIDTH, ROWS)).astype(kind)
    target = np.zeros((ROWS, 2, WIDTH), kind)  # every second row, as gate and up interleave
    arrange("transposed", source.reshape(-1).view(np.uint8), target[:, 0])
    assert (target[:, 0] == source.T).all()
    assert not target[:, 1].any()


def test_awq_codes() -> None:
    words = random_words((8 * WIDTH, ROWS // 8))
    target = np.zeros((ROWS, WIDTH), np.int32)
    arrange("awq", words.view(np.uint8).reshape(-1), target)
    for row in range(ROWS):
        for column in range(8 * WIDTH):
            want = element(words[column, row // 8], 4, ORDER.index(row % 8))
            assert element(target[row, column // 8], 4, column % 8) == want


@pytest.mark.parametrize("group", [-1, 3])
def test_an_index_of_groups_that_do_not_exist(group: int) -> None:
    index = np.array([0, 2, 1, 0], np.int32)
    target = np.zeros((1, 4), np.int32)
    arrange("index-3", index.view(np.uint8), target)
    assert target.tolist() == [[0, 2, 1, 0]]
    index[2] = group
    with pytest.raises(StoreError, match=rf"has the group {group}, but there are 3 groups"):
        arrange("index-3", index.view(np.uint8), target)
