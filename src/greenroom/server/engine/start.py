"""Begin to serve a model: `start` returns at once, and the model loads in the engine's thread."""

from __future__ import annotations

from greenroom.config import Amount, LoadConfig, ServeConfig
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel, Progress

WORKER_BYTES = 24 << 20  # of the process that renders templates
TEXT_CHARS = 32  # characters for each token of a prompt, that are rendered and tokenised
TEXT_BYTES = 24  # for each of them, in all copies
BODIES = 2  # of the largest size, for which there is room at a time
BODY_BYTES = 6  # for each byte of the largest bodies, as objects


def overhead_bytes(context: int, serve: ServeConfig) -> int:
    """Memory that requests take before they reach the model; `--memory` is for all of it."""
    body = Amount.parse(serve.max_body, "--max-body").nbytes or 0
    text = min(body, context * TEXT_CHARS)
    return WORKER_BYTES + text * TEXT_BYTES + BODIES * body * BODY_BYTES


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

    def load_model(progress: Progress) -> LoadedModel:
        from greenroom.hf.load.load import load_with
        from greenroom.hf.load.report import startup_line

        model, tokenizer = load_with(
            source, load, progress=progress, caller_bytes=overhead_bytes(load.context, serve)
        )
        return LoadedModel(model, tokenizer, startup_line(source, model, load, verbose))

    return ContinuousEngine(load_model, serve, load.context, journal)
