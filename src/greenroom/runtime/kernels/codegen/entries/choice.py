"""Indices of the arguments of `find_slots` (`SlotSearch` in native/router.hpp), in int64."""

from __future__ import annotations

FIND_SLOTS_ARGUMENTS = 14
(
    P_CURSOR, EXPERT_COUNT, IDS, TOP_K, NUMBER, FIRST_PIECE, SLOT_OF, LAST_USED, REQUESTS,
    TIER_SLOT_OF, STEP, P_EXPERTS, P_SLOTS, P_RANKS,
) = range(FIND_SLOTS_ARGUMENTS)  # fmt: skip
