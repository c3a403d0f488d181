"""Begin to serve a model: `start` returns at once, and the model loads in the engine's thread."""

from __future__ import annotations

from greenroom.config import LoadConfig, ServeConfig
from greenroom.server.engine import ContinuousEngine, Loaded, Progress
from greenroom.server.journal import Journal


def start(
    source: str,
    load: LoadConfig,
    serve: ServeConfig,
    *,
    journal: Journal | None = None,
    verbose: bool = False,
) -> ContinuousEngine:
    """An engine that serves `source`, once its state is ready; "failed" says why it is not.

    `source` is a Hugging Face folder, a GGUF file, a hub id, or `demo`. `journal` notes every pass,
    so that it can be computed again.
    """

    def loaded(progress: Progress) -> Loaded:
        from greenroom.hf.load import load_with
        from greenroom.hf.report import startup_line

        model, tokenizer = load_with(source, load, progress=progress)
        return Loaded(model, tokenizer, startup_line(source, model, load, verbose))

    return ContinuousEngine(loaded, serve, load.context, journal)
