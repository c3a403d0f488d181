"""The modules of Greenroom that read each format: coverage counts their statements."""

from __future__ import annotations

_TRACE = ("trace.trace", "trace.file")
_CHECKPOINT = ("hf.checkpoint.checkpoint", "hf.checkpoint.resolve", "hf.checkpoint.header")
_TOKENIZER = ("hf.checkpoint.tokenizer", "hf.checkpoint.library_errors")
_PACK = tuple(
    f"hf.checkpoint.pack.{name}"
    for name in ("catalog", "copies", "format", "header_file", "journal", "reading")
)
_GGUF = tuple(
    f"hf.checkpoint.gguf.{name}"
    for name in ("architectures", "checkpoint", "config", "header", "scales", "tokenizer",
                 "metadata.build", "metadata.keys", "metadata.kinds", "metadata.layers",
                 "metadata.models", "metadata.reader", "metadata.rope")
)  # fmt: skip
_QUANTISED = tuple(
    f"hf.checkpoint.quantised.{name}"
    for name in ("compressed", "exported", "float_groups", "fp4", "fp8", "gptq", "methods", "mxfp4",
                 "parts")
)  # fmt: skip
_CONVERSATION = (
    "server.api.shared.conversation", "server.api.shared.calls", "server.api.shared.formats",
    "server.api.shared.schemas", "server.api.shared.pictures", "server.http.bodies",
    "server.http.params", "server.http.answers", "server.engine.tokens.grammar",
    "server.engine.tokens.sampling", "server.engine.requests", "hf.text.templates",
    "hf.text.dialogue", "hf.text.calls", "hf.text.prompt_limit",
)  # fmt: skip

READERS: dict[str, tuple[str, ...]] = {
    "trace": ("trace.container", "trace.tensors", *_TRACE),
    "journal": ("trace.journal", "trace.segments", *_TRACE),
    "npz": ("trace.npz", *_TRACE),
    "parquet": ("study.parquet", *_TRACE),
    "profile": ("core.machine",),
    "pins": ("core.cache.pins",),
    "budgets": ("core.config.shares",),
    "plans": ("plan.history.files", "plan.history.records", "plan.costs"),
    "prompts": ("trace.prompts",),
    "predictor": ("plan.history.files", "trace.container"),
    "learned": ("plan.history.files", "plan.history.routing", "plan.history.recent"),
    "timeline": ("server.page.timeline_frames",),
    "segment": ("server.engine.prompts.segment",),
    "published-csv": ("study.published",),
    "published-npz": ("study.published", "trace.npz"),
    "published-expert-fingerprinting": ("study.published",),
    "published-expert-selection": ("study.published",),
    "published-parquet": ("study.published",),
    "config": (*_CHECKPOINT, *_QUANTISED, "hf.load.describe", "hf.model.skeleton",
               "hf.model.architectures", "hf.model.construction", "hf.kv.sizes",
               "hf.index.catalog", "hf.index.experts", "hf.index.conversions",
               "hf.checkpoint.library_errors"),
    "index": _CHECKPOINT,
    "header": ("hf.checkpoint.header",),
    "tokenizer": _TOKENIZER,
    "tokenizer-config": _TOKENIZER,
    "template": ("hf.text.templates", "hf.text.dialogue", "hf.text.calls", "hf.text.prompt_limit"),
    "generation": ("hf.model.construction", "hf.checkpoint.library_errors"),
    "gguf": ("hf.checkpoint.gguf_file", *_GGUF, *_TOKENIZER),
    "pack": _PACK,
    "pack-journal": ("hf.checkpoint.pack.journal",),
    "adapter": ("hf.variants.adapter", "hf.checkpoint.header"),
    "hub-listing": ("hf.checkpoint.hub.cached", "hf.checkpoint.hub.quantisations"),
    "picture": ("hf.pictures.header", "hf.pictures.decode", "server.api.shared.pictures"),
    "api-key": ("server.http.keys",),
    "batch": ("server.batch.requests",),
    "batch-results": ("server.batch.results",),
    "completions": ("server.api.completions", *_CONVERSATION),
    "chat": ("server.api.chat", *_CONVERSATION),
    "responses": ("server.api.responses", *_CONVERSATION),
    "messages": ("server.api.messages", "server.api.blocks", *_CONVERSATION),
    "ollama": ("server.api.ollama.answers", "server.api.ollama.params", "server.api.ollama.models",
               *_CONVERSATION),
    "admin": ("server.http.bodies", "config.values", "amounts"),
    "options": ("amounts", "config.values", "core.config.shares"),
    "http": ("server.web.connection",),
    "routing": ("server.replicas.affinity",),
    "answer": ("hf.text.dialogue", "server.engine.tokens.reader",
               "server.api.shared.conversation"),
    "sse": ("server.chat.remote",),
    "batch-answers": ("server.batch.remote", "server.batch.run", "server.batch.results"),
}  # fmt: skip
