"""Compiled kernels that choose a token's experts and look up the experts' slots.

`select` chooses experts from a router's logits, `find_slots` looks up their slots. Each runs on one
thread, for one token, in less time than Python takes to build a list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from greenroom.runtime.kernels.codegen.entries.ties import select_largest
from greenroom.runtime.kernels.codegen.llvm.ir import address_of, claim, get, put, put_word, word
from greenroom.runtime.kernels.codegen.llvm.lanes import exponentials, over_rows
from greenroom.runtime.kernels.codegen.llvm.values import Value

F, ONE = np.float32(0), np.float32(1)

# Arguments of `select`, an array of int64. S_CURSOR: 0; the first thread to enter raises it.
# S_CHOSEN: the result, how many experts were chosen. Addresses: PRODUCTS [S_NUMBER] of the model's
# type; SCORES, memory for their softmax, float32 [S_NUMBER]; S_IDS, int64 [S_TOP_K] and S_WEIGHTS
# [S_TOP_K], the results; S_ORDER, memory for S_NUMBER ids, or 0 where torch resolves ties.
# NORMALISED: are weights divided by their sum? Memory for S_TOP_K + 1 ids and as many float32
# begins at S_BEST.
SELECT_ARGUMENTS = 11
(
    S_CURSOR, S_CHOSEN, PRODUCTS, SCORES, S_NUMBER, S_TOP_K, NORMALISED, S_IDS, S_WEIGHTS,
    S_ORDER, S_BEST,
) = range(SELECT_ARGUMENTS)  # fmt: skip

# Arguments of `find_slots`, an array of int64. FIRST_PIECE to STEP are `SlotTables` of
# slots/resident_tables.py. EXPERT_COUNT is a result. Addresses of int64 arrays: IDS [TOP_K], the
# chosen experts; P_EXPERTS (ascending), P_SLOTS and P_RANKS [TOP_K], the results.
FIND_SLOTS_ARGUMENTS = 14
(
    P_CURSOR, EXPERT_COUNT, IDS, TOP_K, NUMBER, FIRST_PIECE, SLOT_OF, LAST_USED, REQUESTS,
    TIER_SLOT_OF, STEP, P_EXPERTS, P_SLOTS, P_RANKS,
) = range(FIND_SLOTS_ARGUMENTS)  # fmt: skip


@over_rows("f", "f", scalars=1)
def divide(kind: Any, x: Value, total: Value) -> Value:
    """Divide a row of float32 numbers by a total."""
    return x / total


@njit(inline="always")
def softmax(kind, products, count, out):
    """Compute the softmax of a router's logits as float32.

    Return False, with NaN as the result, if a logit is NaN or the largest logit is infinite.
    """
    total = exponentials(kind, count, products, ONE, out)
    divide(kind, count, (out, out), (total,))
    return total == total


@njit(inline="always")
def top_scores(scores, number, most, best, ids):
    """Write the largest router scores and their expert ids, in descending order of scores.

    The arrays are `best` and `ids`. Return the number of scores, at most `most`. Of equal scores
    those with the lowest ids are taken, in ascending order of ids.
    """
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
    """Make a kernel that chooses a token's experts: those with the largest softmax scores.

    The gate weights are rounded to the model's type, or stay float32 (`wide`). If the last chosen
    score equals the next one, torch's own order decides (ties.py). The kernel sets its argument
    S_CHOSEN to the number of chosen experts. It stays 0 if torch's order is not known, a logit is
    NaN or the largest logit is infinite.
    """

    def enter(pointer):
        p = address_of(pointer)
        if claim(p, S_CURSOR, 1) != 0:
            return
        top, scores, ids = word(p, S_TOP_K), word(p, SCORES), p + 8 * S_BEST
        best = ids + 8 * (top + 1)
        if not softmax(kind, word(p, PRODUCTS), word(p, S_NUMBER), scores):
            return
        count = top_scores(scores, word(p, S_NUMBER), top + 1, best, ids)
        if count > top and get(F, best, top - 1) == get(F, best, top):
            order = word(p, S_ORDER)
            if order == 0 or not select_largest(scores, order, word(p, S_NUMBER), top):
                return
            for i in range(top):
                put_word(ids, i, word(order, i))
                put(F, best, i, get(F, scores, word(order, i)))
        total = F
        for i in range(top):
            total += get(F, best, i)
        for i in range(top):
            v = get(F, best, i)
            if word(p, NORMALISED) != 0:
                v = v / total
            put(F if wide else kind, word(p, S_WEIGHTS), i, v)
            put_word(word(p, S_IDS), i, word(ids, i))
        put_word(p, S_CHOSEN, top)

    return enter


def find_slots(kind):
    """Make a kernel that looks up a token's experts' slots and records their use.

    The kernel sorts the expert ids, and sets its argument EXPERT_COUNT to their number. It stays 0,
    and no use is recorded, if an id is no expert of the layer, an id occurs twice or an expert is
    not loaded. `kind` is not used.
    """

    def enter(pointer):
        p = address_of(pointer)
        if claim(p, P_CURSOR, 1) != 0:
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
            put_word(slots, i, word(word(p, TIER_SLOT_OF), slot))
            put_word(ranks, i, rank)
        for i in range(count):
            piece = first + word(experts, i)
            put_word(word(p, LAST_USED), piece, word(p, STEP))
            put_word(word(p, REQUESTS), piece, word(word(p, REQUESTS), piece) + 1)
        put_word(p, EXPERT_COUNT, count)

    return enter
