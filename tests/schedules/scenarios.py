"""Table of the scenarios that run under the scheduler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from greenroom.runtime.driver import copier
from greenroom.runtime.store.disk import Staging
from tests.schedules import budget, driver, engine, pressure, prompts, workers
from tests.schedules.runner import Scenario, patched
from tests.schedules.strategies import Replay

SCENARIOS: dict[str, Scenario] = {
    each.name: each
    for each in (
        driver.STEPS, driver.ENDS, driver.PREDICTOR,
        workers.PREDICTIONS, workers.HOST_JOBS, workers.HOST_STEPS,
        engine.ENGINE, engine.RESTARTS, prompts.PROMPTS, pressure.PRESSURE, budget.BUDGET,
    )
}  # fmt: skip
WARM_UP = -1  # the seed of a run whose schedule nobody counts
SHORT = 1 << 16  # bytes of a read buffer; large ones are slow to make


@contextmanager
def ready(names: Iterable[str] = SCENARIOS) -> Iterator[None]:
    """Make ready to run schedules, and run each scenario once: what is compiled is cached then."""
    with (
        patched(),
        engine.toy_models(),
        mock.patch.object(copier, "Staging", partial(Staging, SHORT)),
        mock.patch.object(os, "fsync"),
    ):
        for name in names:
            SCENARIOS[name].run(WARM_UP, Replay([]))
        yield
