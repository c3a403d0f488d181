"""The Triton program that looks up the slots of one token's experts.

The router's choice stays on the device. The program writes the tiles that the products read, with
no entries for an expert that is not in a slot, and the order of the sum over experts. The host
reads a report in pinned memory, one number for each choice, and waits for nothing else:

    number of the look-up << 32 | expert << 1 | whether nothing is to be loaded for it

since it is in a slot, or is no expert of the layer. Each number carries that of its look-up, so
they may arrive in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from greenroom.runtime.slots import tier

ABSENT = tl.constexpr(tier.ABSENT)
UNKNOWN = ("first", "experts", "top_k")  # numbers that differ between layers: compiled once


@triton.jit(do_not_specialize=UNKNOWN)
def look_up(
    index, offsets, tiles, computed, order, report, number, changes, first, experts, top_k,
    AGAIN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Look up the slots of a token's experts `index` [top_k], in Triton.

    offsets:  for each expert of the model, the offset of its slot in units of 64 bytes, or ABSENT
    tiles:    [top_k, 4], see `programs.py`; the entry of a choice is its rank
    computed: [top_k], whether a look-up for this token has found the expert
    order:    [top_k, 2], see `programs.combine`
    report:   [top_k], in the host's memory
    number:   [1], the number of look-ups before this one
    changes:  [2 * K, 2] in the host's memory, if AGAIN: experts of the model, or -1, and their new
              offsets, which are written to `offsets` first
    first:    the number of the layer's first expert in `offsets`
    experts:  the layer's number of experts; ids from this one on are of other processes
    AGAIN:    a look-up for the same token was before: its experts get no entries
    """
    if AGAIN:
        change = changes + 2 * tl.arange(0, 2 * K)
        changed = tl.load(change)
        tl.store(offsets + changed, tl.load(change + 1), mask=changed >= 0)
        tl.debug_barrier()  # offsets are read by other lanes than wrote them
    k = tl.arange(0, K)
    inside = k < top_k
    expert = tl.load(index + k, mask=inside, other=0).to(tl.int64)
    local = inside & (expert < experts)
    offset = tl.load(offsets + first + expert, mask=local, other=ABSENT)
    hit = offset > ABSENT
    entry = hit
    if AGAIN:
        before = tl.load(computed + k, mask=inside, other=0) > 0
        entry = hit & (before == 0)
        hit = hit | before
    tl.store(computed + k, hit.to(tl.int64), mask=inside)
    tile = tiles + 4 * k
    tl.store(tile, tl.where(entry, offset, 0), mask=inside)
    tl.store(tile + 1, tl.where(local, expert, 0), mask=inside)
    tl.store(tile + 2, k.to(tl.int64), mask=inside)
    tl.store(tile + 3, entry.to(tl.int64), mask=inside)
    # The place of a choice is the number of those before it, by ascending expert.
    key = tl.where(inside, expert, 1 << 40) * K + k
    place = tl.sum((key[None, :] < key[:, None]).to(tl.int64), axis=1)
    tl.store(order + 2 * place, tl.where(local, k, -1).to(tl.int64), mask=inside)
    tl.store(order + 2 * place + 1, tl.where(local, k, -1).to(tl.int64), mask=inside)
    count = tl.load(number) + 1
    tl.store(number, count)
    nothing_to_load = (hit | (expert >= experts)).to(tl.int64)
    tl.store(report + k, (count << 32) | (expert << 1) | nothing_to_load, mask=inside)
