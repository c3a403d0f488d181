"""Copies of a router's choice to the host, with pinned memory replaced by ordinary memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.runtime.cuda import ids


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))


def test_memory_of_a_pass_in_inference_mode_serves_one_outside_of_it():
    buffers = dict[int, torch.Tensor]()
    with torch.inference_mode():
        ids._pinned(buffers, 0, torch.zeros(1, 2, dtype=torch.int64)).copy_(torch.tensor([[1, 2]]))
    with torch.no_grad():
        chosen = ids._pinned(buffers, 0, torch.zeros(2, 2, dtype=torch.int64))
        chosen.copy_(torch.tensor([[3, 4], [5, 6]]))  # no inference tensor can be written here
    assert chosen.tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize("tokens", [1, 3, 2000])
def test_memory_has_the_shape_of_the_choice(tokens):
    assert ids._pinned({}, 0, torch.zeros(tokens, 2)).shape == (tokens, 2)


class OnDevice(torch.Tensor):
    is_cuda = True


def test_memory_to_which_a_copy_may_still_write_is_not_used_again(monkeypatch):
    """An interrupt ends the wait, and the next pass may be on another stream."""
    used, interrupted = list[int](), [False, True, False, False]
    pinned = ids._pinned

    def noted(*arguments: Any) -> torch.Tensor:
        buffer = pinned(*arguments)
        used.append(buffer.data_ptr())
        kept.append(buffer)
        return buffer

    class Event:
        def record(self, stream: object) -> None:
            pass

        def synchronize(self) -> None:
            if interrupted.pop(0):
                raise KeyboardInterrupt

    kept = list[torch.Tensor]()
    monkeypatch.setattr(ids, "_pinned", noted)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    chosen = torch.tensor([[1, 2]]).as_subclass(OnDevice)
    assert ids.to_host(chosen, None)[0].tolist() == [[1, 2]]
    with pytest.raises(KeyboardInterrupt):
        ids.to_host(chosen, None)
    for _ in range(2):
        ids.to_host(chosen, None)
    first, second, third, fourth = used
    assert first == second
    assert third == fourth != first
