"""Start the serving engine: `start` returns at once, the engine's thread loads the model."""

from __future__ import annotations

from dataclasses import replace

from greenroom.config import MTP, Amount, LoadConfig, ServeConfig
from greenroom.predictors import OFF
from greenroom.server.engine.journal import Journal
from greenroom.server.engine.loop import ContinuousEngine, LoadedModel, Progress

WORKER_BYTES = 24 << 20  # of the process that renders templates
TEXT_CHARS = 32  # characters of text for each token of a prompt
TEXT_BYTES = 24  # for each character, in all copies of the text
BODIES = 2  # request bodies of the largest size that fit at a time
BODY_BYTES = 6  # for each byte of the largest bodies, as objects


def overhead_bytes(context: int, serve: ServeConfig) -> int:
    """Return how many bytes of `--memory` are set aside for HTTP bodies and prompts.

    The memory of the process that renders chat templates is included.
    """
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
    variants: bool = False,
) -> ContinuousEngine:
    """Start a serving engine for the model `source`, and return before the model is loaded.

    The engine accepts requests once its state is "ready". `source` is a Hugging Face folder, a GGUF
    file, a hub id, or `demo`. `journal` records every forward pass, so that the pass can be
    computed again. `--prefetch off` also ends reads between requests. With `variants`, requests
    choose between the model and each of `--adapter`; UsageError for options that exclude this.
    """
    variants = variants and load.adapter is not None
    if variants:
        serve.check_variants(load)

    def load_model(progress: Progress) -> LoadedModel:
        from greenroom.hf.load.load import load_with
        from greenroom.hf.load.report import startup_line

        model, tokenizer = load_with(
            source,
            load,
            progress=progress,
            caller_bytes=overhead_bytes(load.context, serve),
            mtp=serve.speculate == MTP,
            picture_tokens=serve.picture_tokens,
            variants=variants,
        )
        return LoadedModel(model, tokenizer, startup_line(source, model, load, verbose))

    if load.prefetch == OFF:
        serve = replace(serve, no_idle_prefetch=True)
    return ContinuousEngine(load_model, serve, load.context, journal)
