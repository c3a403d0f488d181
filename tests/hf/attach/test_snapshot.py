"""Snapshots of an expert cache. The live page's tests compare them with an engine's statistics."""

from __future__ import annotations

import threading

import numpy as np

from greenroom import load
from greenroom.hf.attach.snapshot import SnapshotReader, by_layer
from tests.models import cached_tiny


def test_sums_by_layer() -> None:
    assert by_layer(np.array([1, 2, 3, 4]), np.array([0, 3, 4])) == [6, 4]


def test_a_reader_waits_for_no_lock_and_knows_what_was_just_used() -> None:
    model, tokenizer = load(cached_tiny("qwen3_moe", tokenizer=True), cache="50%")
    try:
        reader, driver = SnapshotReader(model.greenroom, model), model.greenroom.driver
        assert not reader.read(0).used.any()
        model(**tokenizer("Once upon a time", return_tensors="pt"))
        read = []
        with driver.step_lock, driver.lock:
            thread = threading.Thread(target=lambda: read.append(reader.read(7)))
            thread.start()
            thread.join(20)
        (found,) = read
        assert found.used.tolist() == (driver.request_counts > 0).tolist()
        assert found.used.any()
        assert (found.capacity, found.memory.keys_values) == (model.greenroom.capacity, 7)
        model(**tokenizer("Once", return_tensors="pt"))
        reader.forget()
        assert not reader.read(0).used.any()
    finally:
        model.greenroom.close()
