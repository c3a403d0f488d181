"""Copies of a router's choice to the host, with pinned memory replaced by ordinary memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.runtime.cuda import ids


def test_memory_of_a_pass_in_inference_mode_serves_one_outside_of_it(monkeypatch):
    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(ids, "_local", type(ids._local)())
    with torch.inference_mode():
        ids._pinned(0, torch.zeros(1, 2, dtype=torch.int64)).copy_(torch.tensor([[1, 2]]))
    with torch.no_grad():
        chosen = ids._pinned(0, torch.zeros(2, 2, dtype=torch.int64))
        chosen.copy_(torch.tensor([[3, 4], [5, 6]]))  # no inference tensor can be written here
    assert chosen.tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize("tokens", [1, 3, 2000])
def test_memory_has_the_shape_of_the_choice(tokens, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))
    monkeypatch.setattr(ids, "_local", type(ids._local)())
    assert ids._pinned(0, torch.zeros(tokens, 2)).shape == (tokens, 2)
