"""From a router's choice to the slots of its experts, compiled: `place`, for one token.

Not a parallel region's body: one thread does it, in less time than Python takes for one list.
"""

from __future__ import annotations

from greenroom.runtime.kernels.ir import address_of, put_word, word

# The words of `place`. From FIRST_PIECE to STEP they are those of core/whole.py's Tables. IDS is
# the address of the ids chosen [K]; the results go to P_EXPERTS, in ascending order, P_SLOTS and
# P_RANKS [K]. All is int64.
PLACE_WORDS = 13
(
    FOUND, IDS, TOP_K, NUMBER, FIRST_PIECE, SLOT_OF, USED, ASKED, PLACE, STEP, P_EXPERTS, P_SLOTS,
    P_RANKS,
) = range(PLACE_WORDS)  # fmt: skip


def place(kind, stamp):
    """Sort the ids and look their slots up; FOUND becomes their number, and their use is noted.

    FOUND stays 0, and nothing is noted, where an id is no expert of the layer, comes twice, or has
    no slot. `kind` is of no consequence.
    """

    def enter(pointer):
        stamp  # noqa: B018 - part of the cache's key
        p = address_of(pointer)
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
