"""What a plan must know of a model, before anything of it is loaded or downloaded.

Of a folder or a GGUF file the config and the headers are read. Of a hub id that is not in the local
cache the hub is asked for the same: its config, and its safetensors' headers by range requests.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

from greenroom.config import LoadConfig
from greenroom.core.machine import name_of
from greenroom.errors import GreenroomError
from greenroom.hf.budget import (
    PREFILL_BLOCK,
    experts_per_token,
    needs,
    needs_at_first,
    needs_on_a_gpu,
)
from greenroom.hf.build import Draft
from greenroom.hf.checkpoint import Checkpoint, local
from greenroom.hf.fingerprint import fingerprint
from greenroom.hf.hub import downloaded, remote
from greenroom.hf.kv_bytes import kv_bytes
from greenroom.hf.lesser import check_copies
from greenroom.hf.load import context_of
from greenroom.hf.pack.copies import CopiesCatalog
from greenroom.hf.pack.format import PackCatalog
from greenroom.hf.parts import Parts
from greenroom.plan import kept
from greenroom.plan.model import Model
from greenroom.runtime.measure import host


def describe(source: str, config: LoadConfig, on_a_gpu: bool = False) -> Model:
    """Sizes and shape of a model under a run's options. Nothing is downloaded but headers.

    What the process takes is what an earlier one of this model took here; without one, what this
    process takes and compiling adds. `on_a_gpu`: sizes are of the GPU's memory.

    Raises as `load` does, before it loads: NotAModel, NotMoE, UnsupportedModel, CheckpointError.
    """
    checkpoint = open_anywhere(source)
    draft = Draft.of(checkpoint, config.dtype)
    context = context_of(draft.model, config.context)
    keys_values = kv_bytes(
        draft.model, config.kv, block=PREFILL_BLOCK, on_a_gpu=on_a_gpu, room=context
    )
    kv_cache = keys_values.total(context)
    parts = Parts(
        draft.catalog, capacity=1, context=context, kv_cache_bytes=kv_cache,
        readers=config.readers, kv=keys_values.kind,
    )  # fmt: skip
    catalog, digest = draft.catalog, fingerprint(checkpoint)
    if on_a_gpu:
        full = needs_on_a_gpu(draft, parts)
    else:
        full = needs(draft, parts, kept.load(digest, name_of(host())).process)
    need = needs_at_first(full, draft, parts, keys_values)
    check_copies(catalog, config.miss_precision)
    low, nested = 0.0, False
    if isinstance(catalog, CopiesCatalog):
        exact, copies, rest = catalog.copy_bytes()
        low, nested = sum(copies) / sum(exact), bool(rest)
    return Model(
        name=source,
        fingerprint=digest,
        experts_per_layer=tuple(b - a for a, b in pairwise(catalog.offsets)),
        top_k=experts_per_token(draft.model),
        expert_bytes=catalog.expert_bytes // catalog.experts,
        slot_bytes=catalog.slot_bytes,
        dense_bytes=need.dense,
        read_bytes=need.dense - unread(draft),
        beside_bytes=need.process + need.workspace + need.staging,
        kv_bytes=need.kv_cache,
        context=context,
        full_bytes=max(0, full.total - need.total),
        low=low,
        nested=nested,
        segments=isinstance(catalog, PackCatalog) and any(x.segments for x in catalog.layouts),
    )


def open_anywhere(source: str) -> Checkpoint:
    """A checkpoint that is here or was downloaded, else what the hub says of one."""
    if (here := local(source)) is not None:
        return Checkpoint.open(here)
    if (folder := downloaded(source)) is not None:
        with suppress(GreenroomError):  # some of it is there
            return Checkpoint.open(folder)
    return remote(source)


def unread(draft: Draft) -> int:
    """Bytes of the input embedding, of which a token reads one row, unless the head is the same."""
    model: Any = draft.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(model.all_tied_weights_keys)
    if embedding is None or (tied and head is not None):
        return 0
    return int(embedding.weight.numel() * draft.dtype.itemsize)
