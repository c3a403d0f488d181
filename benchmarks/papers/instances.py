"""Instances that are hard for a cache of experts: the lower bounds of layered paging.

Angelopoulos et al., "Cache Management for Mixture-of-Experts LLMs", section 3: l layers of n
experts, one a layer and token, k slots. Each function makes the requests of one proof, as a trace
of one request that decodes `rounds` tokens; experts count from 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.config import ZipfConfig
from greenroom.core.cache.cache import Cache
from greenroom.core.pieces import Pieces
from greenroom.core.policy import Policy
from greenroom.errors import UsageError
from greenroom.trace.synth import zipf
from greenroom.trace.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def one_cycles(layers: int, experts: int, rounds: int) -> Trace:
    """Theorem 3.1: the last layer cycles through its experts, all others ask for their first.

    With experts + layers - 1 <= k < layers * experts slots, all that is asked for fits; but where
    the slots are shared out among the layers, evenly, the last layer gets fewer than it has experts
    and misses at least once a cycle for ever: no competitive ratio.
    """
    rows = np.zeros((rounds, layers), np.int64)
    rows[:, -1] = np.arange(rounds) % experts
    return _trace("one layer cycles", rows, experts)


def cruel(policy: Policy, layers: int, experts: int, rounds: int) -> Trace:
    """Theorem 3.2: every round requests an expert that is not in this policy's cache.

    The cache has k = layers * experts - 1 slots. Each round differs from the one before in the
    missing expert only, and the first round requests every layer's first expert. The policy misses
    every round, and OPT once in k - layers + 1 rounds. Raises UsageError for a policy that must
    know the trace in advance.
    """
    if policy.needs_trace:
        raise UsageError(
            f"policy {policy.name} must know the trace in advance: use a policy that does not"
        )
    slots = layers * experts - 1
    pieces = Pieces.unsplit([i * experts for i in range(layers + 1)], [1] * layers)
    cache = Cache(pieces, slots, policy)
    rows = np.zeros((rounds, layers), np.int64)
    for i, row in enumerate(rows):
        if i:
            missing = int(np.argmax(cache.state.slot_of < 0))
            row[:] = rows[i - 1]
            row[missing // experts] = missing % experts
        for layer in range(layers):
            requested = np.array([layer * experts + row[layer]], np.int64)
            cache.serve(requested, i * layers + layer, pin="none")
    return _trace(f"cruel to {policy.name}", rows, experts)


def all_cycle(layers: int, experts: int, rounds: int) -> Trace:
    """Theorem 3.3: every layer cycles through its experts, in step.

    With k = layers * experts - 1 slots LRU misses every request, and OPT one in k.
    """
    rows = np.repeat(np.arange(rounds)[:, None] % experts, layers, axis=1)
    return _trace("all layers cycle", rows, experts)


def uniform(layers: int, experts: int, rounds: int, seed: int = 0) -> Trace:
    """Theorem 3.4: every expert is as likely as the others of its layer.

    With k = layers * experts - 1 slots any policy misses at least every n-th round. OPT's misses
    are as far apart as it takes to ask for all: E(T(n, l)) rounds (`expected_cover_time`), the
    proof says; in fact up to one less, since the request that ends such a block begins the next
    one too. With one layer that matters: Marking's ratio is H_(n - 1) there, less than the
    theorem's H_n.
    """
    return zipf(ZipfConfig(layers=layers, experts=experts, tokens=rounds, a=0.0, seed=seed))


def cover_times(coupons: int, collectors: int, trials: int, seed: int = 0) -> Ints:
    """[trials] T(N, C): rounds until each of C collectors, drawing one a round, has all N coupons.

    A collector that lacks i of N waits for a new one as long as a coin that falls so with i / N.
    """
    random = np.random.default_rng(seed)
    times = np.empty(trials, np.int64)
    for trial in range(trials):
        chances = np.arange(1, coupons + 1) / coupons
        times[trial] = random.geometric(chances, (collectors, coupons)).sum(axis=1).max()
    return times


def expected_cover_time(coupons: int, collectors: int) -> float:
    """E(T(N, C)), exact: the sum over t of P(T > t), by the coupons that one lacks."""
    lacks = np.zeros(coupons + 1)  # chance to lack so many
    lacks[-1], expected = 1.0, 0.0
    new = np.arange(coupons + 1) / coupons  # chance that the next one is new
    while (one_waits := min(lacks[1:].sum(), 1.0)) * collectors > 1e-12:
        with np.errstate(divide="ignore"):  # all wait at first: log(0)
            expected += -np.expm1(collectors * np.log1p(-one_waits))
        gained = lacks * new
        lacks -= gained
        lacks[:-1] += gained[1:]
    return float(expected)


def cover_bound(coupons: int, collectors: int) -> float:
    """Theorem 3.5: E(T(N, C)) >= max(N * H_N, log(C) / 6), in rounds."""
    harmonic = (1 / np.arange(1, coupons + 1)).sum()
    return float(max(coupons * harmonic, np.log(collectors) / 6))


def _trace(name: str, rows: NDArray[Any], experts: int) -> Trace:
    """One request of one-token passes; `rows` [rounds, layers]."""
    rounds, layers = rows.shape
    return Trace(
        experts=rows[..., None].astype(np.uint8 if experts <= 1 << 8 else np.uint16),
        experts_per_layer=np.full(layers, experts, np.int64),
        request_starts=np.array([0, rounds], np.int64),
        pass_starts=np.arange(rounds + 1, dtype=np.int64),
        pass_prefill=np.zeros(rounds, np.bool_),
        labels=(name,),
        meta={"model": f"instance: {name}"},
    )
