"""Which of equal scores torch's `topk` takes on a CPU.

A router's products are rounded to eight bits, so one choice in twenty ends between equal scores:
too often to go back to Python for it. torch's order is that in which libstdc++'s nth_element, and
its insertion sort of what comes before, leave them: a partition around the median of three, again
and again. Where torch has another library or version, that shows when it is tried (router.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.llvm.ir import get, put_word, word

F = np.float32(0)
SORTED = 16  # numbers that std::sort leaves to its insertion sort
FEW = 3  # numbers that nth_element leaves to it


def known(number: int, top_k: int) -> bool:
    """Is the choice of so many one that this module knows? (torch sorts a few of very many by a
    heap.)"""
    return 64 * top_k > number and top_k - 1 <= SORTED


@njit(inline="always")
def before(scores, order, i, j):
    """Does what stands at place i come before what stands at place j?"""
    return get(F, scores, word(order, i)) > get(F, scores, word(order, j))


@njit(inline="always")
def swap(order, i, j):
    kept = word(order, i)
    put_word(order, i, word(order, j))
    put_word(order, j, kept)


@njit(inline="always")
def median(scores, order, a, b, c):
    """The place of the median of three; libstdc++'s __move_median_to_first."""
    if before(scores, order, a, b):
        if before(scores, order, b, c):
            return b
        return c if before(scores, order, a, c) else a
    if before(scores, order, a, c):
        return a
    return c if before(scores, order, b, c) else b


@njit(inline="always")
def partition(scores, order, first, last):
    """Around what stands at `first`: where the second part begins; __unguarded_partition."""
    low, high = first + 1, last
    while True:
        while before(scores, order, low, first):
            low += 1
        high -= 1
        while before(scores, order, first, high):
            high -= 1
        if low >= high:
            return low
        swap(order, low, high)
        low += 1


@njit(inline="always")
def insert(scores, order, first, last):
    """Sort the places first..last - 1; what is equal stays in its order."""
    for at in range(first + 1, last):
        i = at
        while i > first and before(scores, order, i, i - 1):
            swap(order, i, i - 1)
            i -= 1


@njit(inline="always")
def ordered(scores, order, number, top_k):
    """Leave the ids of the `top_k` largest of `number` float32 scores at `order` [number], as
    torch's topk has them. False where nth_element would have gone on by a heap."""
    turns, rest = 0, number
    while rest > 1:
        turns, rest = turns + 2, rest // 2
    for i in range(number):
        put_word(order, i, i)
    first, last = 0, number
    while last - first > FEW:
        if turns == 0:
            return False
        turns -= 1
        middle = first + (last - first) // 2
        swap(order, first, median(scores, order, first + 1, middle, last - 1))
        cut = partition(scores, order, first, last)
        if cut <= top_k - 1:
            first = cut
        else:
            last = cut
    insert(scores, order, first, last)
    insert(scores, order, 0, top_k - 1)
    return True
