"""MoE-Infinity's eviction policy: evict the experts that similar prompts used least.

Source: MoE-Infinity, sections 4.5 and 4.7, algorithm 1, and B.1 for a full collection. An EAM
(expert activation matrix) counts the tokens that were routed to each expert. The collection (EAMC)
has the EAMs of past prompts. The predicted EAM, pEAM, is the sum of the collection's matched EAMs:
those whose cosine distance to the current EAM is at most the smallest distance plus the option
`tolerance`. (The paper sums "several matched EAMs", and does not say which match. By default it is
those at the smallest distance.) The victim is the expert e of layer l, counted from 0, with the
smallest
    (pEAM[l][e] + eps) * (1 - l / L) / sum(pEAM[l])
where L is the number of layers; the score is eps if the row pEAM[l] is zero. The option `matching`
says whether the current EAM counts this pass (`iteration`) or this prompt (`request`). A layer's
requests are counted before its victims are chosen. While the collection is empty, pEAM is the
current EAM. A prompt's EAM is added to the collection when the next prompt begins. If the
collection is full, the new EAM replaces the nearest one. Of equal experts, the one requested least
recently is evicted.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.policy import (
    Arrays,
    CacheState,
    Floats,
    Ids,
    Learning,
    LogicalTime,
    Policy,
    PolicyOption,
    PolicySetup,
    Rows,
    Weights,
    compiled,
)
from greenroom.policies.helpers import scan
from greenroom.policies.helpers.learned import array_of

EPS = 1e-3
MOST_TOKENS = 1 << 24  # of a stored prompt: squares of EAMs must fit into 64 bits
SIZE, TOKEN, SCORED, BY_REQUEST, FIRST = 0, 1, 2, 3, 4


class MoeInfinityState(NamedTuple):
    """State arrays of MoE-Infinity's eviction policy.

    C stored EAMs (expert activation matrices), P experts, L layers.
    """

    prompt: Ints  # [P] EAM of this prompt
    current: Ints  # [P] EAM that is matched
    counts: Ints  # [P, C] EAMs of the collection; one piece's counts are together
    dots: Ints  # [C] products of the current EAM with each of the collection
    squares: Ints  # [C] squared lengths of those in the collection
    scores: Floats  # [C, P] the scores with each EAM as pEAM
    mixed: Floats  # [P] scores where pEAM is a sum of several, or the current EAM
    summed: Ints  # [P] that sum
    index: Ints  # type: ignore[assignment]  # [P] index of each piece's last request
    tolerance: float  # by which a matched EAM's cosine distance may exceed the smallest one
    begin: Ints  # [L + 1] layer l has the pieces begin[l] .. begin[l + 1] - 1
    numbers: Ints  # SIZE of the collection; TOKEN of the current EAM; which place is SCORED, -1
    #              for `mixed`, -2 for not yet; whether matching is BY_REQUEST; FIRST prompt


def build_state(setup: PolicySetup) -> MoeInfinityState:
    pieces, capacity = setup.pieces, setup.options["capacity"]
    return MoeInfinityState(
        prompt=np.zeros(pieces, np.int64),
        current=np.zeros(pieces, np.int64),
        counts=np.zeros((pieces, capacity), np.int64),
        dots=np.zeros(capacity, np.int64),
        squares=np.ones(capacity, np.int64),
        scores=np.zeros((capacity, pieces)),
        mixed=np.zeros(pieces),
        summed=np.zeros(pieces, np.int64),
        index=np.zeros(pieces, np.int64),
        tolerance=setup.options["tolerance"],
        begin=scan.layer_starts(setup),
        numbers=np.array([0, -1, -2, setup.options["matching"] == "request", 1], np.int64),
    )


@compiled
def score(eam: Ints, begin: Ints, scores: Floats) -> None:
    """Compute MoE-Infinity's cache score of every expert from an expert activation matrix.

    `eam` and `scores` are by expert [P]; layer l has the experts begin[l] .. begin[l + 1] - 1.
    """
    layers = begin.size - 1
    for layer in range(layers):
        total = 0
        for piece in range(begin[layer], begin[layer + 1]):
            total += eam[piece]
        for piece in range(begin[layer], begin[layer + 1]):
            if total > 0:
                scores[piece] = (eam[piece] + EPS) * (1 - layer / layers) / total
            else:
                scores[piece] = EPS


@compiled
def similarity(dot: int, square: int) -> float:
    """Compute the squared cosine of two expert activation matrices, up to a constant factor.

    `dot` is their scalar product. `square` is the squared length of the second one; the first one's
    is the constant.
    """
    return float(dot) * float(dot) / float(square)


@compiled
def least_similarity(most: float, eam: Ints, tolerance: float) -> float:
    """Return the least `similarity` of a matrix that matches the matrix `eam`.

    Its cosine may be `tolerance` below the largest one, whose similarity is `most`.
    """
    square = 0
    for piece in range(eam.size):
        square += eam[piece] * eam[piece]
    return min(most, max(0.0, sqrt(most) - tolerance * sqrt(square)) ** 2)


@compiled
def nearest(state: MoeInfinityState, eam: Ints) -> int:
    """Find the index of the stored expert activation matrix nearest to `eam`, by cosine.

    Of equally near ones, the first is found. The result is -1 if none is stored.
    """
    best, most = -1, -1.0
    for place in range(state.numbers[SIZE]):
        dot = 0
        for piece in range(eam.size):
            dot += eam[piece] * state.counts[piece, place]
        closeness = similarity(dot, state.squares[place])
        if closeness > most:
            best, most = place, closeness
    return best


@compiled
def store(state: MoeInfinityState, eam: Ints) -> None:
    """Store an expert activation matrix in the collection of past prompts.

    In a full collection, the new matrix replaces the nearest one.
    """
    size = state.numbers[SIZE]
    if size < state.squares.size:
        place = size
        state.numbers[SIZE] += 1
    else:
        place = nearest(state, eam)
    square = 0
    for piece in range(eam.size):
        square += eam[piece] * eam[piece]
        state.counts[piece, place] = eam[piece]
    state.squares[place] = square
    score(eam, state.begin, state.scores[place])


@compiled
def on_request(cache: CacheState, state: MoeInfinityState, now: LogicalTime) -> None:
    if state.numbers[FIRST] == 0:
        store(state, state.prompt)
    state.numbers[FIRST] = 0
    state.numbers[TOKEN] = -1
    state.prompt[:] = 0


@compiled
def on_step(
    cache: CacheState,
    state: MoeInfinityState,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    now: LogicalTime,
) -> None:
    numbers = state.numbers
    if numbers[TOKEN] == -1 or (numbers[TOKEN] != now.token and numbers[BY_REQUEST] == 0):
        state.current[:] = 0
        state.dots[:] = 0
    numbers[TOKEN] = now.token
    for i in range(pieces.size):
        piece, tokens = pieces[i], rows[i] if rows.size else 1
        state.prompt[piece] += tokens
        state.current[piece] += tokens
        counts = state.counts[piece]
        for place in range(numbers[SIZE]):
            state.dots[place] += tokens * counts[place]
    numbers[SCORED] = -2


@compiled
def match(state: MoeInfinityState) -> int:
    """Find the scores of all experts under MoE-Infinity's predicted activation matrix.

    Returns the index of the stored matrix whose scores apply. If several stored matrices are
    near enough, or none is stored, the scores are written to `state.mixed`, and the result is -1.
    """
    size = state.numbers[SIZE]
    if size == 0:
        score(state.current, state.begin, state.mixed)
        return -1
    most, best, equals = -1.0, 0, 0
    for place in range(size):
        cosine = similarity(state.dots[place], state.squares[place])
        if cosine > most:
            most, best, equals = cosine, place, 1
        elif cosine == most:
            equals += 1
    if state.tolerance > 0:
        most, equals = least_similarity(most, state.current, state.tolerance), 0
        for place in range(size):
            equals += similarity(state.dots[place], state.squares[place]) >= most
    if equals == 1:
        return best
    state.summed[:] = 0
    for place in range(size):
        if similarity(state.dots[place], state.squares[place]) >= most:
            for piece in range(state.summed.size):
                state.summed[piece] += state.counts[piece, place]
    score(state.summed, state.begin, state.mixed)
    return -1


@compiled
def victim(
    cache: CacheState, state: MoeInfinityState, group: int, piece: int, now: LogicalTime
) -> int:
    if state.numbers[SCORED] == -2:
        state.numbers[SCORED] = match(state)
    place = state.numbers[SCORED]
    scores = state.scores[place] if place >= 0 else state.mixed
    return int(scan.lowest_unpinned(cache, group, scores, state.index))


def export(state: MoeInfinityState) -> Arrays:
    """Export the collection of EAMs, with that of the last prompt of the run (B.2)."""
    size, capacity = int(state.numbers[SIZE]), state.squares.size
    eams = list(state.counts[:, :size].T)
    if state.numbers[FIRST] == 0 and state.prompt.any():
        if size == capacity:
            dots = (state.prompt @ state.counts).astype(np.float64)
            eams[int((dots * dots / state.squares).argmax())] = state.prompt
        else:
            eams.append(state.prompt)
    collection = np.array(eams, np.int64).reshape(len(eams), state.prompt.size)
    return {"collection": collection.clip(max=MOST_TOKENS).astype(np.int32)}


def restore(state: MoeInfinityState, arrays: Arrays) -> None:
    """Restore the collection of EAMs; the last ones if it is larger than the capacity.

    ValueError if the collection does not fit the model.
    """
    shape = (None, state.prompt.size)
    eams = array_of(arrays, "collection", shape, np.int32, 0, MOST_TOKENS).astype(np.int64)
    eams = eams[eams.any(axis=1)][-state.squares.size :]
    size, layers = len(eams), state.begin.size - 1
    state.counts[:, :size] = eams.T
    state.squares[:size] = (eams * eams).sum(axis=1)
    sizes = np.diff(state.begin)
    totals = np.add.reduceat(eams, state.begin[:-1], axis=1).repeat(sizes, axis=1)
    proximity = (1 - np.arange(layers) / layers).repeat(sizes)
    state.scores[:size] = np.where(totals > 0, (eams + EPS) * proximity / totals.clip(min=1), EPS)
    for unlearned in (state.prompt, state.current, state.dots):
        unlearned[:] = 0
    state.numbers[[SIZE, TOKEN, SCORED, FIRST]] = size, -1, -2, 1


moe_infinity = Policy(
    "moe-infinity",
    build_state,
    victim,
    scan.on_use,
    scan.on_use,
    on_step=on_step,
    weighs=True,
    on_request=on_request,
    options=(
        PolicyOption(
            "matching",
            "iteration",
            "which EAM is matched with the collection: this pass's, or this prompt's so far",
            choices=("iteration", "request"),
        ),
        PolicyOption("capacity", 100, "EAMs in the collection", 1, 1_000_000),
        PolicyOption("tolerance", 0.0, "cosine distance beyond the smallest that matches", 0, 1),
    ),
    learning=Learning(1, export, restore),
)
