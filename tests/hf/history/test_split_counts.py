"""What is counted for MoEpic's configurator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from greenroom.hf.history.split_counts import HeadTimer


def test_only_head_calls_with_one_position_are_timed(monkeypatch: pytest.MonkeyPatch):
    now = iter([1.0, 3.0, 10.0, 20.0, 24.0])
    monkeypatch.setattr(
        "greenroom.hf.history.split_counts.time", SimpleNamespace(perf_counter=lambda: next(now))
    )
    layer = nn.Linear(2, 2)
    model: Any = SimpleNamespace(get_output_embeddings=lambda: layer)
    head = HeadTimer(model)
    for length in (1, 5, 1):
        layer(torch.zeros(1, length, 2))
    assert head.seconds == 3.0  # of 2 and 4 seconds
    head.close()
    layer(torch.zeros(1, 1, 2))  # would ask for another time
    assert HeadTimer(SimpleNamespace(get_output_embeddings=lambda: None)).seconds == 0  # type: ignore[arg-type]
