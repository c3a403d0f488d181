"""Engines over models as users load them."""

from __future__ import annotations

import time

import pytest

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine.requests import Request
from greenroom.server.engine.start import start
from tests.gguf_models import DATA
from tests.server.rig import GREEDY, PATIENCE, AnswerRecorder


@pytest.mark.usefixtures("no_threads_left")
def test_a_model_with_a_quantised_output_matrix_is_served() -> None:
    """A quantised GGUF file's output matrix is no parameter of the model."""
    load = LoadConfig(cache="50%", context=64)
    engine = start(str(DATA / "Q8_0.gguf"), load, ServeConfig())
    try:
        until = time.monotonic() + PATIENCE
        while engine.state()[0] == "loading" and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.state()[0] == "ready", engine.state()
        assert engine.model.get_output_embeddings().weight is None
        recorder = AnswerRecorder()
        engine.submit(
            Request(ids=(3, 5, 7), max_new_tokens=4, sampling=GREEDY, end_ids=()), recorder
        )
        assert recorder.end().new_tokens == 4
    finally:
        engine.stop(0.0)
