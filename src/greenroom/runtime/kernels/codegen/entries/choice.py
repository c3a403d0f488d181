"""From a router's products to its choice (`select`) and to the slots of its experts (`place`).

Compiled, for one token. One thread does it, in less time than Python takes for one list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.ties import ordered
from greenroom.runtime.kernels.codegen.llvm.ir import address_of, claim, get, put, put_word, word
from greenroom.runtime.kernels.codegen.llvm.lanes import exponentials, over_rows
from greenroom.runtime.kernels.codegen.llvm.values import Value

F, ONE = np.float32(0), np.float32(1)

# The words of `select`, after the cursor: the products, [S_NUMBER] of the model's type; SCORES,
# float32 [S_NUMBER], their softmax, and the results go to S_IDS, int64 [S_TOP_K], and S_WEIGHTS
# [S_TOP_K]. SUMMED: are weights divided by their sum? S_ORDER: room for S_NUMBER ids, or 0 where
# equal scores are torch's matter. Room for S_TOP_K + 1 ids and as many float32 follows.
SELECT_WORDS = 11
(
    S_TURN, S_FOUND, PRODUCTS, SCORES, S_NUMBER, S_TOP_K, SUMMED, S_IDS, S_WEIGHTS, S_ORDER, S_BEST,
) = range(SELECT_WORDS)  # fmt: skip

# The words of `place`. From FIRST_PIECE to STEP they are those of `SlotTables` in
# slots/resident_tables.py. IDS is the address of the ids chosen [K]; the results go to P_EXPERTS,
# in ascending order, P_SLOTS and P_RANKS [K]. All is int64.
PLACE_WORDS = 14
(
    P_TURN, FOUND, IDS, TOP_K, NUMBER, FIRST_PIECE, SLOT_OF, USED, ASKED, PLACE, STEP, P_EXPERTS,
    P_SLOTS, P_RANKS,
) = range(PLACE_WORDS)  # fmt: skip


@over_rows("f", "f", scalars=1)
def shares(kind: Any, x: Value, total: Value) -> Value:
    return x / total


@njit(inline="always")
def softmax(kind, products, count, out):
    """out [count], float32, from products of `kind`; False where one is no number."""
    total = exponentials(kind, count, products, ONE, out)
    shares(kind, count, (out, out), (total,))
    return total == total


@njit(inline="always")
def largest(scores, number, most, best, ids):
    """The `most` largest scores in descending order and whose they are; of equal ones those with
    the lowest ids, in ascending order. Returns how many there are."""
    count = 0
    for e in range(number):
        v = get(F, scores, e)
        if count == most and v <= get(F, best, most - 1):
            continue
        i = min(count, most - 1)
        while i > 0 and get(F, best, i - 1) < v:
            put(F, best, i, get(F, best, i - 1))
            put_word(ids, i, word(ids, i - 1))
            i -= 1
        put(F, best, i, v)
        put_word(ids, i, e)
        count = min(count + 1, most)
    return count


def select(kind, wide):
    """The softmax of a router's products, in float32, its largest scores and whose they are.

    S_FOUND becomes their number; weights are rounded to `kind`, or left in float32 (`wide`). Where
    the last one chosen and the next are equal, so that another could as well be chosen, torch's own
    order decides (ties.py); S_FOUND stays 0 where that is not known, or one is no number.
    """

    def enter(pointer):
        p = address_of(pointer)
        if claim(p, S_TURN, 1) != 0:
            return
        top, scores, ids = word(p, S_TOP_K), word(p, SCORES), p + 8 * S_BEST
        best = ids + 8 * (top + 1)
        if not softmax(kind, word(p, PRODUCTS), word(p, S_NUMBER), scores):
            return
        count = largest(scores, word(p, S_NUMBER), top + 1, best, ids)
        if count > top and get(F, best, top - 1) == get(F, best, top):
            order = word(p, S_ORDER)
            if order == 0 or not ordered(scores, order, word(p, S_NUMBER), top):
                return
            for i in range(top):
                put_word(ids, i, word(order, i))
                put(F, best, i, get(F, scores, word(order, i)))
        total = F
        for i in range(top):
            total += get(F, best, i)
        for i in range(top):
            v = get(F, best, i)
            if word(p, SUMMED) != 0:
                v = v / total
            put(F if wide else kind, word(p, S_WEIGHTS), i, v)
            put_word(word(p, S_IDS), i, word(ids, i))
        put_word(p, S_FOUND, top)

    return enter


def place(kind):
    """Sort the ids and look their slots up; FOUND becomes their number, and their use is noted.

    FOUND stays 0, and nothing is noted, where an id is no expert of the layer, comes twice, or has
    no slot. `kind` is of no consequence.
    """

    def enter(pointer):
        p = address_of(pointer)
        if claim(p, P_TURN, 1) != 0:
            return
        count, first = word(p, TOP_K), word(p, FIRST_PIECE)
        experts, slots, ranks = word(p, P_EXPERTS), word(p, P_SLOTS), word(p, P_RANKS)
        for rank in range(count):
            expert = word(word(p, IDS), rank)
            if expert < 0 or expert >= word(p, NUMBER):
                return
            slot = word(word(p, SLOT_OF), first + expert)
            if slot < 0:
                return
            i = rank
            while i > 0 and word(experts, i - 1) > expert:
                put_word(experts, i, word(experts, i - 1))
                put_word(slots, i, word(slots, i - 1))
                put_word(ranks, i, word(ranks, i - 1))
                i -= 1
            if i > 0 and word(experts, i - 1) == expert:
                return
            put_word(experts, i, expert)
            put_word(slots, i, word(word(p, PLACE), slot))
            put_word(ranks, i, rank)
        for i in range(count):
            piece = first + word(experts, i)
            put_word(word(p, USED), piece, word(p, STEP))
            put_word(word(p, ASKED), piece, word(word(p, ASKED), piece) + 1)
        put_word(p, FOUND, count)

    return enter
