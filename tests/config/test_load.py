"""Options of a run that belong together."""

from __future__ import annotations

import pytest

from greenroom.config import LoadConfig, SimulateConfig
from greenroom.errors import UsageError


def test_tau_needs_splits_that_are_chosen_while_running():
    assert LoadConfig(split="auto", tau=100).tau == 100
    assert LoadConfig(split="auto", tau=0).tau == 0
    with pytest.raises(UsageError, match="--tau has an effect only with --split auto, got --split"):
        LoadConfig(split="0.5", tau=100)
    with pytest.raises(UsageError, match="--tau must be at least 0 token"):
        LoadConfig(split="auto", tau=-1)
    with pytest.raises(UsageError, match="--tau has an effect only with --system moepic"):
        SimulateConfig(capacity="4", policy="lru", tau=100, machine="auto")
