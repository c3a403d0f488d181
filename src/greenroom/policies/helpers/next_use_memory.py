"""The memory of NEXT-USE: what followed earlier passes that are like the present one.

Two passes are alike if their layers use the same experts. At every layer, the *match* of an earlier
pass with the present one is

    match = FADE * its match one layer earlier + |A and B| / sqrt(|A| * |B|)

where A and B are the experts that the two passes use in the layer. At a pass's first layer, an
earlier pass continues with the match of the pass before it. So a match covers the present pass and
the passes before it, as a text that occurs a second time does. Earlier passes weigh
exp(SHARPNESS * (match / largest possible match - 1)), as in attention.

The *recalled value* of an expert is a weighted mean of discount ** (T - 1), where T is the number
of passes after the earlier pass until its layer used the expert. It starts from PRIOR passes of the
value that the expert's share of use in this prompt gives; the same value continues where the expert
was not used in HORIZON passes.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.policy import Floats, Ids, Weights, compiled
from greenroom.policies.helpers.bitsets import ONE, count_ones, trailing_zeros

FADE = np.float32(0.9)  # of a match from layer to layer
SHARPNESS = 10.0
LEAST = 0.1  # of the largest weight: passes that weigh less are left out
PRIOR = 0.1  # weight of the value before anything is recalled
HORIZON = 6  # passes
MOST_SHARE = 0.95  # of a prompt's steps
NONE = np.uint64(0)


class Memory(NamedTuple):
    """State arrays of NEXT-USE's memory of M passes.

    L layers, W blocks of 64 experts. A later pass has the slot before, and slot M - 1 follows slot
    0.
    """

    sets: NDArray[np.uint64]  # [L, W, M] the experts that a pass used in a layer, as bits
    scale: Weights  # [L, M] 1 / sqrt(their number); 0: none
    match: Weights  # [M] with the present pass
    best: Weights  # [1] the largest match
    most: Weights  # [1] largest possible match
    present: Ints  # [1] slot of the present pass; M before the first one
    first: Ints  # [1] slots from this one on have been used
    layer: Ints  # [1] of the last step; L: the next step begins a pass
    powers: Floats  # [HORIZON + 1] of the discount
    share: Floats  # [E] of the prompt's steps in which it was used; scratch
    base: Floats  # [E] values that the shares give; scratch
    recalled: Floats  # [E] scratch
    term: Floats  # [E] of the estimates; scratch


def empty(layers: int, experts: int, passes: int, discount: float) -> Memory:
    """Create an empty memory for a number of passes."""
    blocks = -(-experts // 64)
    return Memory(
        np.zeros((layers, blocks, passes), np.uint64),
        np.zeros((layers, passes), np.float32),
        np.zeros(passes, np.float32),
        np.zeros(1, np.float32),
        np.zeros(1, np.float32),
        np.full(1, passes, np.int64),
        np.full(1, passes, np.int64),
        np.full(1, layers, np.int64),
        discount ** np.arange(HORIZON + 1.0),
        *np.zeros((4, experts)),
    )


@compiled
def observe(memory: Memory, layer: int, pieces: Ids, begin: int) -> None:
    """Store a step's experts, and match earlier passes with them."""
    passes = memory.match.size
    if layer <= memory.layer[0]:
        _begin_pass(memory)
    memory.layer[0] = layer
    present, scale = memory.present[0], np.float32(1.0 / np.sqrt(pieces.size))
    memory.scale[layer, present] = scale
    for j in range(pieces.size):
        i = pieces[j] - begin
        memory.sets[layer, i >> 6, present] |= ONE << np.uint64(i & 63)
    memory.most[0] = FADE * memory.most[0] + np.float32(1.0)
    for slot in range(passes):
        memory.match[slot] *= FADE
    for block in range(memory.sets.shape[1]):
        bits = memory.sets[layer, block, present]
        for slot in range(passes):
            common = np.float32(np.int32(count_ones(memory.sets[layer, block, slot] & bits)))
            memory.match[slot] += common * (scale * memory.scale[layer, slot])
    memory.match[present] = np.float32(0.0)


@compiled
def _begin_pass(memory: Memory) -> None:
    """Let matches continue with the passes that followed, and clear the oldest pass's slot."""
    passes = memory.match.size
    before = memory.match[0]
    memory.present[0] = (memory.present[0] if memory.present[0] > 0 else passes) - 1
    memory.first[0] = min(memory.first[0], memory.present[0])
    for slot in range(memory.first[0], passes - 1):
        memory.match[slot] = memory.match[slot + 1]
    memory.match[passes - 1] = before
    present = memory.present[0]
    for layer in range(memory.scale.shape[0]):
        memory.scale[layer, present] = np.float32(0.0)
        for block in range(memory.sets.shape[1]):
            memory.sets[layer, block, present] = NONE


@compiled
def _find_best(memory: Memory) -> None:
    """Find the largest match, by its bits: they are in order, and a loop of integers is fast."""
    best = np.int32(0)
    for bits in memory.match.view(np.int32):
        best = max(best, bits)
    memory.best.view(np.int32)[0] = best


@compiled
def recall(memory: Memory, layer: int, experts: int) -> None:
    """Write the terms of a layer's experts, given their shares of use in this prompt."""
    passes, present = memory.match.size, memory.present[0]
    most = memory.most[0]
    for i in range(experts):
        share = min(MOST_SHARE, memory.share[i])
        memory.base[i] = np.divide(share, 1.0 - memory.powers[1] * (1.0 - share))
        memory.recalled[i] = 0.0
    _find_best(memory)
    bound = max(memory.best[0] + most * np.float32(log(LEAST) / SHARPNESS), np.float32(0.0))
    total = remainder = PRIOR
    for slot in range(passes):
        if memory.match[slot] <= bound:
            continue
        weight = exp(SHARPNESS * (memory.match[slot] / most - 1.0))
        age = slot - present if slot > present else slot - present + passes
        later = weight * memory.powers[min(HORIZON, age)]
        total += weight
        remainder += later
        _add_pass(memory, layer, slot, min(HORIZON, age), weight, later)
    for i in range(experts):
        recalled = np.divide(memory.recalled[i] + remainder * memory.base[i], total)
        memory.term[i] = _score(recalled) - _score(memory.base[i])


@compiled
def _score(value: float) -> float:
    """Return the sum of terms from which NEXT-USE computes a value."""
    centred = 2.0 * min(max(value, 0.01), 0.99) - 1.0
    score: float = np.divide(2.0 * centred, sqrt(1.0 - centred * centred))  # not checked for 0
    return score


@compiled
def _add_pass(
    memory: Memory, layer: int, slot: int, ahead: int, weight: float, later: float
) -> None:
    """Add what followed an earlier pass: the first use of each expert in `ahead` passes."""
    passes = memory.match.size
    for block in range(memory.sets.shape[1]):
        earlier, at = NONE, slot
        for d in range(ahead):
            at = at - 1 if at > 0 else passes - 1
            new = memory.sets[layer, block, at] & ~earlier
            earlier |= new
            while new != NONE:
                i = (block << 6) + int(trailing_zeros(new))
                memory.recalled[i] += weight * memory.powers[d] - later * memory.base[i]
                new &= new - ONE


def export(memory: Memory) -> NDArray[np.uint64]:
    """Export the sets of all passes, the latest first, [passes, L, W]."""
    present = int(memory.present[0])
    sets = np.roll(memory.sets, -present, axis=2)[..., : memory.match.size - int(memory.first[0])]
    return np.ascontiguousarray(np.moveaxis(sets, 2, 0))


def check(memory: Memory, sets: NDArray[np.uint64], experts: Ints) -> None:
    """Check sets before `restore`; ValueError if one has an expert that its layer lacks.

    experts: numbers of experts, [L]
    """
    numbers = np.arange(64 * memory.sets.shape[1])
    exist = np.packbits(numbers < experts[:, None], axis=1, bitorder="little").view("<u8")
    if (sets & ~exist.astype(np.uint64)).any():
        raise ValueError("the array passes has an expert that its layer does not have")


def restore(memory: Memory, sets: NDArray[np.uint64]) -> None:
    """Restore the latest passes; the next step begins a pass that is like none of them so far."""
    passes = memory.match.size
    count = min(len(sets), passes)
    first = passes - count
    for array in (memory.sets, memory.scale, memory.match, memory.most):
        array[:] = 0
    memory.sets[..., first:] = np.moveaxis(sets[:count], 0, 2)
    bits = np.unpackbits(memory.sets.view(np.uint8), axis=2)
    sizes = bits.reshape(*memory.sets.shape, 64).sum(axis=(1, 3), dtype=np.float32)
    np.divide(1, np.sqrt(sizes), out=memory.scale, where=sizes > 0)
    memory.first[:] = first
    memory.present[:] = first
    memory.layer[:] = len(memory.scale)
