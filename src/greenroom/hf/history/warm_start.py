"""A run begins with what earlier runs left of its model's routing, and leaves its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np

from greenroom.core.predictor import Predictor
from greenroom.errors import OutputError, StoreError
from greenroom.plan.history import files
from greenroom.plan.history.routing import Arrays, Ids, RoutingHistory
from greenroom.runtime.driver.driver import Driver

LIMIT_S = 2.0  # for reading the hot set: a third of what importing torch and transformers takes
UNTIMED = 32 << 20  # bytes that are read before it is known how fast the disk is
HALF_LIFE = 2000.0  # passes after which requests count half as much
LEAST = 16  # passes that are worth keeping

log = logging.getLogger(__name__)


class WarmStart:
    """A model's routing over runs. Without `fingerprint` nothing is left to later runs."""

    def __init__(
        self,
        fingerprint: str,
        driver: Driver,
        before: RoutingHistory | None,
        name: str,
        predictor: Predictor | None,
    ) -> None:
        """`before` is what earlier runs left, `name` the predictor's, as the user chose it. The
        predictor gets the state that it had."""
        self._fingerprint, self._driver = fingerprint, driver
        self._name, self._predictor = name, predictor
        self._before = before
        self._passes = 0  # of warming up
        if predictor is not None and before is not None and name in before.states:
            try:
                predictor.restore(before.states[name])
            except ValueError as error:  # a state that does not fit is left out
                log.warning("predictor %s starts anew: %s", name, error)

    def warm_up(self) -> int:
        """Read the hot set into an empty cache, for LIMIT_S at most; the experts that were read."""
        scheduler = self._driver.scheduler
        if self._before is None:
            return 0
        offsets, view = scheduler.view.pieces.offsets, scheduler.view
        sizes = view.group_sizes()
        given = tuple(map(float, sizes)) if scheduler.view.pieces.split and len(sizes) > 1 else None
        hot = self._before.hot_set(offsets, view.slots, given or view.scope)
        try:
            return warm_up(self._driver, hot, LIMIT_S)
        except StoreError as error:
            log.warning("the cache starts colder than it could: %s", error)
            return int(scheduler.residents().size)
        finally:
            self._passes = self._driver.meter.passes
            self._driver.request_counts[:] = 0
            self._driver.miss_counts[:] = 0

    def save(self, beside: Mapping[str, Arrays | None]) -> None:
        """Leave what was learned since then, and states `beside`, where it is enough to be worth
        it."""
        driver = self._driver
        passes = driver.meter.passes - self._passes
        if not self._fingerprint or passes < LEAST or not files.enabled():
            return
        popularity = driver.request_counts.astype(np.float64)
        states: dict[str, Arrays] = {}
        if (before := self._before) is not None:
            states |= before.states
            if before.popularity.shape == popularity.shape:
                popularity += before.popularity * 0.5 ** (passes / HALF_LIFE)
        if self._predictor is not None:
            states[self._name] = self._predictor.state()
        states |= {name: each for name, each in beside.items() if each is not None}
        residents = driver.scheduler.residents()
        hot = residents[np.argsort(-popularity[residents], kind="stable")]
        try:
            files.save_routing(self._fingerprint, RoutingHistory(hot, popularity, states))
        except OutputError as error:
            log.warning("the routing of this run is not kept: %s", error)


def warm_up(driver: Driver, hot: Ids, limit_s: float) -> int:
    """Have a cache that is empty hold these pieces, dearest first; the number that was read.

    They come as the steps of a pass that computes nothing, each layer in its share of the time
    that is left: the dearest of a layer, as many as the disk was fast enough for until then.
    """
    pieces, policy = driver.pieces, driver.scheduler.policy
    layer_of = pieces.layer[hot]
    layers = np.unique(layer_of).tolist()
    begin, nbytes, count = time.perf_counter(), driver.meter.bytes_read, 0
    for done, layer in enumerate(layers):
        mine = hot[layer_of == layer]
        taken, read = time.perf_counter() - begin, driver.meter.bytes_read - nbytes
        room = read / taken * (limit_s - taken) / (len(layers) - done) if read else UNTIMED
        fits = np.cumsum(pieces.nbytes[mine]) <= room
        experts = np.sort(mine[fits]) - pieces.offsets[layer]
        told = np.ones(experts.size) if policy.weighs else None
        driver.step(
            layer,
            experts,
            lambda experts, slots, *part: None,
            None if told is None else told.astype(np.int32),
            None if told is None else told.astype(np.float32),
        )
        count += experts.size
    return count
