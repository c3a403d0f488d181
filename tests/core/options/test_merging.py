"""Several approximating options at once: each takes part in the description of the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from greenroom.core.config import scheduler
from greenroom.core.config.base import Approximation, OptionConfig
from greenroom.core.config.scheduler import SchedulerConfig

RULE = "of layers above 20 left out"


@dataclass(frozen=True)
class SkipLayersConfig(OptionConfig):
    """A further option, whose rule is not a threshold."""

    def approximation(self) -> Approximation | None:
        return Approximation(other=(RULE,))


def test_of_each_kind_the_higher_threshold_counts() -> None:
    low = Approximation(low=0.4, skip=0.1, precision="int4", share=0.25)
    skip = Approximation(skip=0.2, substitute=0.3, promote=True, other=(RULE,))
    merged = Approximation(0.4, 0.2, 0.3, True, "int4", 0.25, (RULE,))
    assert low.merge(skip) == merged
    assert skip.merge(low) == merged


@dataclass(frozen=True)
class ThresholdConfig(OptionConfig):
    """An option with a threshold."""

    def approximation(self) -> Approximation | None:
        return Approximation(skip=0.1)


@pytest.mark.parametrize("order", [0, 1])
def test_a_config_describes_all_of_its_options(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    options = (ThresholdConfig, SkipLayersConfig)[:: -1 if order else 1]
    monkeypatch.setattr(scheduler, "OPTIONS", options)
    at = SchedulerConfig().approximation()
    assert at is not None
    assert (at.skip, at.other) == (0.1, (RULE,))


def test_without_options_that_approximate_there_is_no_approximation() -> None:
    assert SchedulerConfig().approximation() is None
