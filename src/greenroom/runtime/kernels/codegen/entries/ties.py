"""Reproduce the order that torch's `topk` gives equal scores on a CPU.

A router's logits are rounded to eight bits, so one choice in twenty ends between equal scores: too
often to return to Python for it. torch's order is the result of libstdc++'s nth_element (a
partition around the median of three, repeated) and its insertion sort of the elements before the
nth. Whether torch uses this library is tested by trials (dense/router.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.llvm.ir import get, put_word, word

F = np.float32(0)
SORTED = 16  # std::sort sorts so many numbers by insertion
FEW = 3  # nth_element sorts so many numbers by insertion


def is_supported(number: int, top_k: int) -> bool:
    """Check that the code here can reproduce torch's topk of `number` scores.

    To select a few of very many scores, torch uses a heap; it sorts more than 17 results by other
    means than insertion.
    """
    return 64 * top_k > number and top_k - 1 <= SORTED


@njit(inline="always")
def precedes(scores, order, i, j):
    """Check that one expert's score is larger than another's.

    The experts are those at the places i and j of `order`.
    """
    return get(F, scores, word(order, i)) > get(F, scores, word(order, j))


@njit(inline="always")
def swap(order, i, j):
    """Swap two ids in an order of experts."""
    first_id = word(order, i)
    put_word(order, i, word(order, j))
    put_word(order, j, first_id)


@njit(inline="always")
def median_place(scores, order, a, b, c):
    """Find the place with the median of three scores.

    The comparisons are those of libstdc++'s __move_median_to_first.
    """
    if precedes(scores, order, a, b):
        if precedes(scores, order, b, c):
            return b
        return c if precedes(scores, order, a, c) else a
    if precedes(scores, order, a, c):
        return a
    return c if precedes(scores, order, b, c) else b


@njit(inline="always")
def partition(scores, order, first, last):
    """Partition a range of scores around its first one, as libstdc++'s __unguarded_partition.

    Return the place at which the second part begins.
    """
    low, high = first + 1, last
    while True:
        while precedes(scores, order, low, first):
            low += 1
        high -= 1
        while precedes(scores, order, first, high):
            high -= 1
        if low >= high:
            return low
        swap(order, low, high)
        low += 1


@njit(inline="always")
def insertion_sort(scores, order, first, last):
    """Sort a range of scores by insertion, in descending order.

    The range is first to last - 1. Equal scores keep their order.
    """
    for at in range(first + 1, last):
        i = at
        while i > first and precedes(scores, order, i, i - 1):
            swap(order, i, i - 1)
            i -= 1


@njit(inline="always")
def select_largest(scores, order, number, top_k):
    """Write the ids of the largest router scores in the order of torch's topk.

    The first `top_k` places of `order` [number] receive these ids. Scores are float32 [number].
    Return False if nth_element would continue with a heap, whose order is not reproduced.
    """
    rounds, remaining = 0, number
    while remaining > 1:
        rounds, remaining = rounds + 2, remaining // 2
    for i in range(number):
        put_word(order, i, i)
    first, last = 0, number
    while last - first > FEW:
        if rounds == 0:
            return False
        rounds -= 1
        middle = first + (last - first) // 2
        swap(order, first, median_place(scores, order, first + 1, middle, last - 1))
        cut = partition(scores, order, first, last)
        if cut <= top_k - 1:
            first = cut
        else:
            last = cut
    insertion_sort(scores, order, first, last)
    insertion_sort(scores, order, 0, top_k - 1)
    return True
