"""MoE-Infinity's eviction policy: evict the experts that similar prompts used least.

Source: MoE-Infinity, sections 4.3 to 4.7, algorithm 1, and B.1 for a full collection. An EAM
(expert activation matrix) counts the tokens that were routed to each expert. The collection (EAMC)
has the EAMs of past requests. Prefill and decode have an EAM and a collection each (4.3). The
predicted EAM, pEAM, is the sum of the collection's matched EAMs: those whose cosine distance to the
current EAM is at most the smallest distance plus the option `tolerance`. (The paper sums "several
matched EAMs", and does not say which match. By default it is those at the smallest distance.) The
victim is the expert e of layer l, counted from 0, with the smallest
    (pEAM[l][e] + eps) * (1 - l / L) / sum(pEAM[l])
where L is the number of layers; the score is eps if the row pEAM[l] is zero. The paper gives no
eps; here it is a thousandth of a token. The option `matching` says whether the current EAM counts
this pass (`iteration`) or this request so far (`request`). A layer's requests are counted before
its victims are chosen. While the collection is empty, pEAM is the current EAM. A request's EAMs are
added to the collections when the next request begins. If a collection is full, the new EAM replaces
the nearest one. Of equal experts, the one requested least recently is evicted.
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
PREFILL, DECODE = 0, 1  # parts of a request, each with an EAM and a collection of its own
PARTS = ("prefill", "decode")
TOKEN, SCORED, BY_REQUEST, PART = 0, 1, 2, 3


class MoeInfinityState(NamedTuple):
    """State arrays of MoE-Infinity's eviction policy.

    C stored EAMs (expert activation matrices) for each of 2 parts (prefill, decode), P experts, L
    layers.
    """

    prompt: Ints  # [2, P] EAMs of this request
    current: Ints  # [P] EAM that is matched
    counts: Ints  # [2, P, C] EAMs of the collections; one piece's counts are together
    dots: Ints  # [C] products of the current EAM with each of its collection
    squares: Ints  # [2, C] squared lengths of those in the collections
    sizes: Ints  # [2] EAMs in each collection
    scores: Floats  # [2, C, P] the scores with each EAM as pEAM
    mixed: Floats  # [P] scores where pEAM is a sum of several, or the current EAM
    summed: Ints  # [P] that sum
    index: Ints  # type: ignore[assignment]  # [P] index of each piece's last request
    tolerance: float  # by which a matched EAM's cosine distance may exceed the smallest one
    begin: Ints  # [L + 1] layer l has the pieces begin[l] .. begin[l + 1] - 1
    numbers: Ints  # TOKEN and PART of the current EAM; which place is SCORED, -1 for `mixed`, -2
    #              for not yet; whether matching is BY_REQUEST


def build_state(setup: PolicySetup) -> MoeInfinityState:
    pieces, capacity = setup.pieces, setup.options["capacity"]
    return MoeInfinityState(
        prompt=np.zeros((2, pieces), np.int64),
        current=np.zeros(pieces, np.int64),
        counts=np.zeros((2, pieces, capacity), np.int64),
        dots=np.zeros(capacity, np.int64),
        squares=np.ones((2, capacity), np.int64),
        sizes=np.zeros(2, np.int64),
        scores=np.zeros((2, capacity, pieces)),
        mixed=np.zeros(pieces),
        summed=np.zeros(pieces, np.int64),
        index=np.zeros(pieces, np.int64),
        tolerance=setup.options["tolerance"],
        begin=scan.layer_starts(setup),
        numbers=np.array([-1, -2, setup.options["matching"] == "request", DECODE], np.int64),
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
def nearest(eam: Ints, counts: Ints, squares: Ints, size: int) -> int:
    """Find the index of the stored expert activation matrix nearest to `eam`, by cosine.

    Of equally near ones, the first is found. The result is -1 if none is stored.
    """
    best, most = -1, -1.0
    for place in range(size):
        dot = 0
        for piece in range(eam.size):
            dot += eam[piece] * counts[piece, place]
        closeness = similarity(dot, squares[place])
        if closeness > most:
            best, most = place, closeness
    return best


@compiled
def store(state: MoeInfinityState, part: int) -> None:
    """Store the expert activation matrix of a finished prompt, or of its answer.

    In a full collection, the new matrix replaces the nearest one. A matrix without counts is not
    stored.
    """
    eam, counts, squares = state.prompt[part], state.counts[part], state.squares[part]
    square = 0
    for piece in range(eam.size):
        square += eam[piece] * eam[piece]
    if square == 0:
        return
    place = state.sizes[part]
    if place < squares.size:
        state.sizes[part] += 1
    else:
        place = nearest(eam, counts, squares, place)
    for piece in range(eam.size):
        counts[piece, place] = eam[piece]
    squares[place] = square
    score(eam, state.begin, state.scores[part, place])


@compiled
def on_request(cache: CacheState, state: MoeInfinityState, now: LogicalTime) -> None:
    for part in range(2):
        store(state, part)
    state.prompt[:] = 0
    state.numbers[TOKEN] = -1


@compiled
def begin_matching(state: MoeInfinityState, part: int) -> None:
    """Begin the activation matrix that is matched: of a new pass, or of the request so far."""
    state.current[:] = 0
    state.dots[:] = 0
    state.numbers[PART] = part
    if state.numbers[BY_REQUEST] == 0:
        return
    for piece in range(state.current.size):
        tokens = state.prompt[part, piece]
        if tokens > 0:
            state.current[piece] = tokens
            for place in range(state.sizes[part]):
                state.dots[place] += tokens * state.counts[part, piece, place]


@compiled
def on_step(
    cache: CacheState,
    state: MoeInfinityState,
    pieces: Ids,
    rows: Rows,
    weights: Weights,
    now: LogicalTime,
) -> None:
    numbers, part = state.numbers, PREFILL if now.prefill else DECODE
    begins = numbers[TOKEN] == -1 or numbers[PART] != part
    if begins or (numbers[TOKEN] != now.token and numbers[BY_REQUEST] == 0):
        begin_matching(state, part)
    numbers[TOKEN] = now.token
    for i in range(pieces.size):
        piece, tokens = pieces[i], rows[i] if rows.size else 1
        state.prompt[part, piece] += tokens
        state.current[piece] += tokens
        counts = state.counts[part, piece]
        for place in range(state.sizes[part]):
            state.dots[place] += tokens * counts[place]
    numbers[SCORED] = -2


@compiled
def match(state: MoeInfinityState) -> int:
    """Find the scores of all experts under MoE-Infinity's predicted activation matrix.

    Returns the index of the stored matrix whose scores apply. If several stored matrices are
    near enough, or none is stored, the scores are written to `state.mixed`, and the result is -1.
    """
    part = state.numbers[PART]
    size, squares = state.sizes[part], state.squares[part]
    if size == 0:
        score(state.current, state.begin, state.mixed)
        return -1
    most, best, equals = -1.0, 0, 0
    for place in range(size):
        cosine = similarity(state.dots[place], squares[place])
        if cosine > most:
            most, best, equals = cosine, place, 1
        elif cosine == most:
            equals += 1
    if state.tolerance > 0:
        most, equals = least_similarity(most, state.current, state.tolerance), 0
        for place in range(size):
            equals += similarity(state.dots[place], squares[place]) >= most
    if equals == 1:
        return best
    state.summed[:] = 0
    for place in range(size):
        if similarity(state.dots[place], squares[place]) >= most:
            for piece in range(state.summed.size):
                state.summed[piece] += state.counts[part, piece, place]
    score(state.summed, state.begin, state.mixed)
    return -1


@compiled
def victim(
    cache: CacheState, state: MoeInfinityState, group: int, piece: int, now: LogicalTime
) -> int:
    if state.numbers[SCORED] == -2:
        state.numbers[SCORED] = match(state)
    place = state.numbers[SCORED]
    scores = state.scores[state.numbers[PART], place] if place >= 0 else state.mixed
    return int(scan.lowest_unpinned(cache, group, scores, state.index))


def export(state: MoeInfinityState) -> Arrays:
    """Export the collections of EAMs, with those of the last request of the run (B.2)."""
    collections = {}
    for part, name in enumerate(PARTS):
        prompt, counts, size = state.prompt[part], state.counts[part], int(state.sizes[part])
        eams = list(counts[:, :size].T)
        if prompt.any():
            if size == counts.shape[1]:
                dots = (prompt @ counts).astype(np.float64)
                eams[int((dots * dots / state.squares[part]).argmax())] = prompt
            else:
                eams.append(prompt)
        collection = np.array(eams, np.int64).reshape(len(eams), prompt.size)
        collections[name] = collection.clip(max=MOST_TOKENS).astype(np.int32)
    return collections


def restore(state: MoeInfinityState, arrays: Arrays) -> None:
    """Restore the collections of EAMs; the last ones of those larger than the capacity.

    ValueError if a collection does not fit the model.
    """
    shape, layers = (None, state.current.size), state.begin.size - 1
    collections = [
        array_of(arrays, name, shape, np.int32, 0, MOST_TOKENS).astype(np.int64) for name in PARTS
    ]
    widths = np.diff(state.begin)
    proximity = (1 - np.arange(layers) / layers).repeat(widths)
    for part, collection in enumerate(collections):
        eams = collection[collection.any(axis=1)][-state.squares.shape[1] :]
        size = state.sizes[part] = len(eams)
        state.counts[part, :, :size] = eams.T
        state.squares[part, :size] = (eams * eams).sum(axis=1)
        totals = np.add.reduceat(eams, state.begin[:-1], axis=1).repeat(widths, axis=1)
        scores = (eams + EPS) * proximity / totals.clip(min=1)
        state.scores[part, :size] = np.where(totals > 0, scores, EPS)
    for unlearned in (state.prompt, state.current, state.dots):
        unlearned[:] = 0
    state.numbers[[TOKEN, SCORED]] = -1, -2


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
            "which EAM is matched with the collection: this pass's, or this request's so far",
            choices=("iteration", "request"),
        ),
        PolicyOption("capacity", 100, "EAMs in each collection", 1, 1_000_000),
        PolicyOption("tolerance", 0.0, "cosine distance beyond the smallest that matches", 0, 1),
    ),
    learning=Learning(2, export, restore),
)
