"""What the operating system refuses is one clear error."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import greenroom
from greenroom.errors import DeviceError
from greenroom.refusals import name_refusals, refusal_of
from tests.models import cached_tiny


def refuse_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")  # CPython's message


def allocate_with_torch() -> None:
    torch.empty(1 << 44, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (allocate_with_torch, "refuses 17,592,186,044,416 bytes of memory"),
        (lambda: bytearray(1 << 60), "refuses memory"),
        (refuse_threads, "refuses a new thread"),
    ],
)
def test_refusals_are_named(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(DeviceError) as error, name_refusals():
        action()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_errors_pass_unchanged() -> None:
    wrong = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as error, name_refusals():
        raise wrong
    assert error.value is wrong
    assert refusal_of(OSError("can't start new thread")) is None


def descriptors(folder: Path) -> int:
    found = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return sum(str(path.resolve()).startswith(str(folder.resolve())) for path in found)


@pytest.mark.parametrize("number", [1, 2])
def test_a_refused_reader_leaves_nothing_open(
    number: int, no_threads_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reader's thread is refused, or the second one's."""
    folder, start, started = cached_tiny("qwen3_moe", tokenizer=True), threading.Thread.start, [0]

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("greenroom-0-"):
            started[0] += 1
            if started[0] == number:
                refuse_threads()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.raises(DeviceError, match="refuses a new thread"):
        greenroom.load(folder, cache="50%", prefetch="off")
    assert descriptors(folder) == 0
    monkeypatch.undo()
    model, _ = greenroom.load(folder, cache="50%", prefetch="off")
    model.greenroom.detach()


def test_refused_slots_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(DeviceError, match="address space"):
        greenroom.load(folder, cache="50%", prefetch="off")
    assert descriptors(folder) == 0
