"""Stage 2 of loading: what budgets and plans must know of a model, of which headers were read.

Of a folder or a GGUF file the config and the headers are read. Of a hub id that is not in the local
cache the hub is asked for the same: its config, and its safetensors' headers by range requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.core.machine import name_of
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog, PackCatalog
from greenroom.hf.checkpoint.resolve import open_anywhere
from greenroom.hf.kv.sizes import KVBytes, kv_bytes
from greenroom.hf.memory.approximate import check_copies
from greenroom.hf.memory.budget import PREFILL_BLOCK, SLACK, Needs, Workspace, experts_per_token
from greenroom.hf.model.draft import Draft
from greenroom.plan.history.files import load_records
from greenroom.plan.model import Model
from greenroom.runtime.measure.bandwidth import host
from greenroom.runtime.memory.system import rss_bytes
from greenroom.runtime.store.disk import CHUNK_BYTES

COMPILERS = 160 << 20  # what compiling the kernels adds to the process; measured once it is done
LIBRARIES = 256 << 20  # what cuBLAS and Triton take of a GPU when they are first used


@dataclass(frozen=True, slots=True)
class Description:
    """A model on the meta device, and the context that a run of it has room for.

    context: tokens
    top_k:   experts that one token asks of a layer
    """

    draft: Draft
    fingerprint: str
    context: int
    keys_values: KVBytes
    top_k: int

    @classmethod
    def of(cls, draft: Draft, config: LoadConfig, on_a_gpu: bool) -> Description:
        """UsageError where keys and values cannot be kept as asked."""
        context = context_of(draft.model, config.context)
        keys_values = kv_bytes(
            draft.model, config.kv, block=PREFILL_BLOCK, on_a_gpu=on_a_gpu, room=context
        )
        digest = fingerprint(draft.checkpoint)
        return cls(draft, digest, context, keys_values, experts_per_token(draft.model))

    @property
    def kv_cache_bytes(self) -> int:
        """Of a full context, and an update of it."""
        return self.keys_values.total(self.context)

    def needs(self, readers: int) -> Needs:
        """With a full context, before anything is loaded.

        The process is what an earlier one took; the first has the kernels to compile.
        """
        process = self.process_bytes
        return Needs(
            process=rss_bytes() + COMPILERS if process is None else process,
            dense=self.draft.dense_bytes,
            kv_cache=self.kv_cache_bytes,
            workspace=self._workspace(self.context),
            staging=readers * (CHUNK_BYTES + (1 << 20)),
        )

    def needs_on_a_gpu(self) -> Needs:
        """The same of a GPU's memory, where the process is not."""
        workspace = self._workspace(self.context)
        return Needs(0, self.draft.dense_bytes, self.kv_cache_bytes, workspace, LIBRARIES)

    def needs_at_first(self, need: Needs) -> Needs:
        """The same while the context is no longer than the first block of a prompt: slots that a
        run begins with (`Growth.bind`), and has with short contexts."""
        block = min(self.context, PREFILL_BLOCK)
        return replace(
            need, kv_cache=self.keys_values.total(block), workspace=self._workspace(block)
        )

    def _workspace(self, tokens: int) -> int:
        """What activations take where the context has so many tokens and a block ends it."""
        space = Workspace.of(self.draft.model, self.draft.catalog)
        return space.nbytes(1, min(tokens, PREFILL_BLOCK), tokens) + SLACK

    @property
    def process_bytes(self) -> int | None:
        """What an earlier process of this model took here beside dense parts and slots."""
        return load_records(self.fingerprint, name_of(host())).process


def context_of(model: PreTrainedModel, context: int) -> int:
    """Tokens to make room for: as asked, but no more than the model can take."""
    config = model.config.get_text_config()
    return min(context, getattr(config, "max_position_embeddings", None) or context)


def describe(source: str, config: LoadConfig, on_a_gpu: bool = False) -> Model:
    """Sizes and shape of a model under a run's options. Nothing is downloaded but headers.

    What the process takes is what an earlier one of this model took here; without one, what this
    process takes and compiling adds. `on_a_gpu`: sizes are of the GPU's memory.

    Raises as `load` does, before it loads: NotAModel, NotMoE, UnsupportedModel, CheckpointError.
    """
    draft = Draft.of(open_anywhere(source), config.dtype)
    description, catalog = Description.of(draft, config, on_a_gpu), draft.catalog
    full = description.needs_on_a_gpu() if on_a_gpu else description.needs(config.readers)
    need = description.needs_at_first(full)
    check_copies(catalog, config.approximation())
    low, nested = 0.0, False
    if isinstance(catalog, CopiesCatalog):
        exact, copies, rest = catalog.copy_bytes()
        low, nested = sum(copies) / sum(exact), bool(rest)
    return Model(
        name=source,
        fingerprint=description.fingerprint,
        experts_per_layer=tuple(b - a for a, b in pairwise(catalog.offsets)),
        top_k=description.top_k,
        expert_bytes=catalog.expert_bytes // catalog.experts,
        slot_bytes=catalog.slot_bytes,
        dense_bytes=need.dense,
        read_bytes=need.dense - unread(draft),
        beside_bytes=need.process + need.workspace + need.staging,
        kv_bytes=need.kv_cache,
        context=description.context,
        full_bytes=max(0, full.total - need.total),
        low=low,
        nested=nested,
        segments=isinstance(catalog, PackCatalog) and any(x.segments for x in catalog.layouts),
    )


def unread(draft: Draft) -> int:
    """Bytes of the input embedding, of which a token reads one row, unless the head is the same."""
    model: Any = draft.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(model.all_tied_weights_keys)
    if embedding is None or (tied and head is not None):
        return 0
    return int(embedding.weight.numel() * draft.dtype.itemsize)
