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
        ones = sum(minus << shift for shift in range(0, 32, bits))
        word = (int(words[group, row // per]) + ones) % (1 << 32)
        return int(element(word, bits, row % per))

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


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_old_zeros_are_those_before_the_export(bits: int, ones: int) -> None:
    """`qzeros -= ones` is what GPTQModel's convert_gptq_v2_to_v1_format does to int32."""
    zeros = np.random.default_rng(1).integers(0, 1 << bits, (ROWS, WIDTH), np.uint8)
    zeros[: ROWS // 2] //= 1 << bits - 1  # many zeros of 0
    assert (zeros == 0).sum() > WIDTH
    words = np.zeros((WIDTH, ROWS * bits // 32), np.uint32)
    for row in range(ROWS):
        word, place = divmod(row * bits, 32)
        words[:, word] |= zeros[row].astype(np.uint32) << np.uint32(place)
    stored = words.view(np.int32) - np.int32(ones)
    target = np.zeros((ROWS, WIDTH), np.int8)
    arrange(f"zeros{bits}-minus-1", stored.view(np.uint8).reshape(-1), target)
    assert (target.view(np.uint8) == zeros).all()


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
