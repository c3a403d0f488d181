"""Begin to serve a model: `start` returns at once, and the model loads in the engine's thread."""

from __future__ import annotations

import gc
from typing import Any

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine import ContinuousEngine, Progress
from greenroom.server.journal import Journal


def start(
    source: str, load: LoadConfig, serve: ServeConfig, *, journal: Journal | None = None
) -> ContinuousEngine:
    """An engine that serves `source`, once its state is ready; "failed" says why it is not.

    `source` is a Hugging Face folder, a GGUF file, a hub id, or `demo`. `journal` notes every pass,
    so that it can be computed again.
    """

    def model_and_tokenizer(progress: Progress) -> tuple[Any, Any]:
        from greenroom.hf.load import load_with

        found = load_with(source, load, progress=progress)
        gc.freeze()  # what is there now stays: only what answers leave is worth a look
        return found

    return ContinuousEngine(model_and_tokenizer, serve, load.context, journal)
