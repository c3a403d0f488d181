"""Warm start: a run loads the experts that earlier runs of its model kept or used most."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from greenroom.core.predictor import Predictor
from greenroom.errors import OutputError, StoreError
from greenroom.plan.history import files
from greenroom.plan.history.routing import Arrays, Ids, RoutingHistory
from greenroom.runtime.driver.driver import Driver

LIMIT_S = 2.0  # for reading the hot set: a third of the imports of torch and transformers
UNTIMED = 32 << 20  # bytes that are read before the speed of the disk is known
HALF_LIFE = 2000.0  # passes after which requests count half as much
LEAST = 16  # passes; the routing of shorter runs is not saved

log = logging.getLogger(__name__)


class WarmStart:
    """Expert usage of a model's runs, saved to fill the cache of later runs.

    If `fingerprint` (a digest of the checkpoint) is empty, nothing is saved.
    """

    def __init__(
        self,
        fingerprint: str,
        driver: Driver,
        before: RoutingHistory | None,
        name: str,
        predictor: Predictor | None,
    ) -> None:
        """Start from the expert usage of earlier runs (`before`), and restore learned state.

        `name` is the predictor's name as the user wrote it; its state is stored under that name.
        What the eviction policy has learned is stored under the policy's name without options.
        """
        self._fingerprint, self._driver = fingerprint, driver
        self._name, self._predictor = name, predictor
        self._passes = 0  # that warming up took
        self._policy = f"policy {driver.scheduler.policy.name.partition(':')[0]}"
        self._before = self._restore_policy(before)
        if predictor is not None and before is not None and name in before.states:
            try:
                predictor.restore(before.states[name])
            except ValueError as error:  # the state is of another version or shape
                log.warning(
                    "predictor %s cannot use its state of the last run, and learns anew: %s",
                    name,
                    error,
                )

    def _restore_policy(self, before: RoutingHistory | None) -> RoutingHistory | None:
        """Restore what the eviction policy has learned; return the history without it."""
        if before is None or self._policy not in before.states:
            return before
        states = dict(before.states)
        try:
            self._driver.scheduler.view.restore_learned(states.pop(self._policy))
        except ValueError as error:
            log.warning(
                "%s cannot use what it learned in earlier runs, and learns anew: %s",
                self._policy,
                error,
            )
        return replace(before, states=states)

    def warm_up(self) -> int:
        """Read the most used experts into an empty cache, in at most 2 seconds.

        Returns the number of experts read. Without earlier runs, nothing is read.
        """
        scheduler = self._driver.scheduler
        if self._before is None:
            return 0
        offsets, view = scheduler.view.pieces.offsets, scheduler.view
        sizes = view.group_sizes()
        budgets = (
            tuple(map(float, sizes)) if scheduler.view.pieces.split and len(sizes) > 1 else None
        )
        hot = self._before.hot_set(offsets, view.slots, budgets or view.scope)
        try:
            return warm_up(self._driver, hot, LIMIT_S)
        except StoreError as error:
            log.warning(
                "reading the experts of earlier runs failed, so the first tokens may be slower: %s",
                error,
            )
            return int(scheduler.residents().size)
        finally:
            self._passes = self._driver.meter.passes
            self._driver.request_counts[:] = 0
            self._driver.miss_counts[:] = 0

    def save(self, extra_states: Mapping[str, Arrays | None]) -> None:
        """Save this run's expert usage, learned state and `extra_states` for later runs.

        A run of fewer than 16 forward passes is not saved.
        """
        driver = self._driver
        passes = driver.meter.passes - self._passes
        if not self._fingerprint or passes < LEAST or not files.is_enabled():
            return
        popularity = self._popularity(passes)
        states: dict[str, Arrays] = {} if self._before is None else {**self._before.states}
        if self._predictor is not None:
            states[self._name] = self._predictor.state()
        if learned := driver.scheduler.view.export_learned():
            states[self._policy] = learned
        states |= {name: each for name, each in extra_states.items() if each is not None}
        residents = driver.scheduler.residents()
        hot = residents[np.argsort(-popularity[residents], kind="stable")]
        try:
            files.save_routing(self._fingerprint, RoutingHistory(hot, popularity, states))
        except OutputError as error:
            log.warning("could not save the expert usage of this run for later runs: %s", error)

    def _popularity(self, passes: int) -> NDArray[np.float64]:
        """Return how often each expert was requested, after `passes` passes of this run."""
        popularity, before = self._driver.request_counts.astype(np.float64), self._before
        if before is not None and before.popularity.shape == popularity.shape:
            popularity += before.popularity * 0.5 ** (passes / HALF_LIFE)
        return popularity

    def expected_use(self) -> Ids:
        """List all experts, most likely to be used first.

        Before the first pass of a run, the experts that the last run ended with come first. Then
        follow experts by the number of requests, in this run and in earlier ones. Experts without
        a request come last, layer by layer: a prompt uses nearly all experts of one layer after
        the other.
        """
        pieces, passes = self._driver.pieces, self._driver.meter.passes - self._passes
        hot = np.empty(0, np.int64)
        if self._before is not None and not passes:
            hot = self._before.hot
        history = RoutingHistory(hot, self._popularity(passes))
        used = history.hot_set(pieces.offsets, pieces.experts)
        return np.concatenate([used, np.setdiff1d(np.arange(pieces.experts), used)])


def warm_up(driver: Driver, hot: Ids, limit_s: float) -> int:
    """Read experts (`hot`, most used first) into an empty cache, for at most `limit_s` seconds.

    Returns the number of experts read. Each layer has an equal share of the remaining time. As
    many of its experts are read as fit into that time at the speed of the reads so far. The
    eviction policy learns nothing from these reads.
    """
    learned = driver.scheduler.view.export_learned()
    try:
        return _read(driver, hot, limit_s)
    finally:
        if learned:
            driver.scheduler.view.restore_learned(learned)


def _read(driver: Driver, hot: Ids, limit_s: float) -> int:
    pieces, policy = driver.pieces, driver.scheduler.policy
    layer_of = pieces.layer[hot]
    layers = np.unique(layer_of).tolist()
    begin, nbytes, count = time.perf_counter(), driver.meter.bytes_read, 0
    for done, layer in enumerate(layers):
        mine = hot[layer_of == layer]
        elapsed, read = time.perf_counter() - begin, driver.meter.bytes_read - nbytes
        room = read / elapsed * (limit_s - elapsed) / (len(layers) - done) if read else UNTIMED
        fits = np.cumsum(pieces.nbytes[mine]) <= room
        experts = np.sort(mine[fits]) - pieces.offsets[layer]
        ones = np.ones(experts.size) if policy.weighs else None
        driver.step(
            layer,
            experts,
            lambda experts, slots, *part: None,
            None if ones is None else ones.astype(np.int32),
            None if ones is None else ones.astype(np.float32),
        )
        count += experts.size
    return count
