"""Stage 2 of loading: compute the sizes of a model that memory budgets and plans need.

The sizes come from the config and the tensor headers of a folder or a GGUF file. For a hub id that
is not in the local cache, only config and headers are downloaded (range requests).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.config import Amount, LoadConfig
from greenroom.core.machine import machine_name
from greenroom.hf.checkpoint.fingerprint import fingerprint
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog, PackCatalog
from greenroom.hf.checkpoint.resolve import open_or_inspect
from greenroom.hf.kv.sizes import KVBytes, kv_bytes
from greenroom.hf.memory.approximate import check_copies
from greenroom.hf.memory.budget import MemoryNeeds, Workspace, experts_per_token
from greenroom.hf.memory.devices import COMPILED
from greenroom.hf.memory.prompt_block import prompt_block
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.model.graph_decoder import graph_decoder
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.mtp.layer import mtp_layer_of
from greenroom.hf.variants.index import adapters_of
from greenroom.plan.history.files import load_records
from greenroom.plan.model import Model
from greenroom.runtime.kernels.dense.table import stored_weight
from greenroom.runtime.kernels.native.library import missing_reason
from greenroom.runtime.measure.bandwidth import host_facts
from greenroom.runtime.memory.system import rss_bytes
from greenroom.runtime.store.disk import CHUNK_BYTES

UNLIMITED = 1 << 62  # bytes, of a budget
COMPILERS = 160 << 20  # added to the process by compiling the policy; later runs use a measurement
LIBRARIES = 256 << 20  # GPU memory that cuBLAS and Triton allocate at their first use


@dataclass(frozen=True, slots=True)
class Description:
    """A model's sizes before it is loaded: context, KV cache, experts per token.

    skeleton:    the model on the meta device, without its expert parameters
    fingerprint: digest of the checkpoint, by which results of earlier runs are stored
    context:     tokens that the KV cache has room for
    prompt_block: most tokens of a prompt that a forward pass computes
    keys_values: bytes of the KV cache by number of tokens
    top_k:       experts that one token uses in a layer
    """

    skeleton: ModelSkeleton
    fingerprint: str
    context: int
    prompt_block: int
    keys_values: KVBytes
    top_k: int

    @classmethod
    def of(cls, skeleton: ModelSkeleton, config: LoadConfig, on_a_gpu: bool) -> Description:
        """Compute a model's sizes for a run's options.

        Raises UsageError if the model cannot use the KV cache type of `--kv`.
        """
        context = context_of(skeleton.model, config.context)
        block = prompt_block(config, skeleton, context, on_a_gpu)
        keys_values = kv_bytes(
            skeleton.model, config.kv, block=block, on_a_gpu=on_a_gpu, room=context
        )
        digest = fingerprint(skeleton.checkpoint)
        if mtp_layer_of(skeleton.model) is not None:  # it has experts and a KV cache of its own
            digest += "-mtp"
            layers = keys_values.layers
            keys_values = replace(keys_values, layers=(*layers, layers[-1]))
        if skeleton.variants is not None:  # whose routing has other numbers of experts
            digest += f"-adapters-{skeleton.variants.digest}"
        if skeleton.subset is not None:
            digest += f"-subset-{skeleton.subset.digest}"
        top_k = experts_per_token(skeleton.model)
        return cls(skeleton, digest, context, block, keys_values, top_k)

    def slot_budget(
        self,
        readers: int,
        compiled: bool,
        budget: int = UNLIMITED,
        min_slots: int = 1,
        caller_bytes: int = 0,
        **options: Any,
    ) -> SlotBudget:
        """Return the memory budget that expert slots and KV cache share, before loading.

        budget:       bytes of memory, of the GPU if it computes, else of the process
        readers:      threads that read experts, each with its own buffer
        compiled:     whether compiled kernels on a CPU compute the experts
        min_slots:    expert slots that must fit; otherwise BudgetError names a sufficient budget
        caller_bytes: bytes of this memory that the calling program uses for itself

        On a CPU, the memory of Python and libraries is the least that the last three runs of this
        model measured on this machine. Without such runs, it is the memory of this process plus an
        allowance for compiling the policy.
        """
        skeleton, on_a_gpu = self.skeleton, self.keys_values.on_a_gpu
        need = MemoryNeeds(
            process=caller_bytes,
            dense=skeleton.dense_bytes,
            kv_cache=0,
            workspace=0,
            staging=0,
            libraries=LIBRARIES if on_a_gpu else 0,
        )
        if not on_a_gpu:
            recorded = load_records(self.fingerprint, machine_name(host_facts())).process
            process = rss_bytes() + COMPILERS if recorded is None else recorded
            staging = readers * (CHUNK_BYTES + (1 << 20))
            need = replace(need, process=process + caller_bytes, staging=staging)
        space = Workspace.of(skeleton.model, skeleton.catalog, compiled)
        return SlotBudget(
            budget,
            need,
            skeleton.catalog,
            self.keys_values,
            space,
            self.context,
            self.prompt_block,
            min_slots,
            **options,
        )


def shrink_dense(skeleton: ModelSkeleton, config: LoadConfig, compiled: bool) -> None:
    """Keep large embeddings on disk, and other dense matrices quantised if kernels allow it.

    `--disk-tables` says which embeddings. `compiled`: the run uses compiled kernels on a CPU, which
    can read quantised matrices.
    """
    if config.disk_tables != "off":
        least = Amount.parse(config.disk_tables, "--disk-tables").nbytes
        assert least is not None
        skeleton.keep_tables_on_disk(least)
    if compiled and skeleton.dtype is not torch.float32:
        skeleton.keep_dense_encoded()


def context_of(model: PreTrainedModel, context: int) -> int:
    """Return the requested context length in tokens, or the model's limit if that is less."""
    config = model.config.get_text_config()
    return min(context, getattr(config, "max_position_embeddings", None) or context)


def describe(source: str, config: LoadConfig, on_a_gpu: bool = False) -> Model:
    """Compute a model's sizes and shape under a run's options, for planning.

    Only config and tensor headers are read or downloaded. With `on_a_gpu`, all sizes are of the
    GPU's memory. Otherwise they include the memory of Python and libraries: as measured in the last
    run of this model on this machine, else that of this process plus an allowance for compiling
    the policy.

    Raises NotAModel, NotMoE, UnsupportedModel or CheckpointError.
    """
    checkpoint = open_or_inspect(source, config.config)
    skeleton = ModelSkeleton.of(
        checkpoint, config.dtype, adapters=adapters_of(config), only=config.only_experts
    )
    named = "native" if config.kernels == "auto" and not missing_reason() else config.kernels
    compiled = not on_a_gpu and named in COMPILED
    shrink_dense(skeleton, config, compiled)
    description, catalog = Description.of(skeleton, config, on_a_gpu), skeleton.catalog
    slot_budget = description.slot_budget(config.readers, compiled)
    full, need = slot_budget.full_context_needs(), slot_budget.first_block_needs()
    check_copies(catalog, config.approximation())
    low, nested = 0.0, False
    if isinstance(catalog, CopiesCatalog):
        exact, copies, remainder = catalog.copy_bytes()
        low, nested = sum(copies) / sum(exact), bool(remainder)
    return Model(
        name=source,
        fingerprint=description.fingerprint,
        experts_per_layer=catalog.experts_per_layer,
        top_k=description.top_k,
        expert_bytes=catalog.all_experts_bytes // catalog.experts,
        slot_bytes=catalog.slot_bytes,
        dense_bytes=need.dense,
        read_bytes=need.dense - unread_bytes(skeleton),
        overhead_bytes=need.process + need.workspace + need.staging + need.libraries,
        kv_bytes=need.kv_cache,
        context=description.context,
        full_bytes=max(0, full.total - need.total),
        low=low,
        nested=nested,
        segments=isinstance(catalog, PackCatalog) and any(x.segments for x in catalog.layouts),
        token_graph=_has_token_graph(skeleton, config),
    )


def _has_token_graph(skeleton: ModelSkeleton, config: LoadConfig) -> bool:
    """Tell whether a pass of one token is one CUDA graph on a GPU that has all experts."""
    catalog, plain_keys = skeleton.catalog, config.kv == "dynamic"
    modules = [skeleton.model.get_submodule(name) for name in catalog.layers]
    segments = any(layout.segments for layout in catalog.layouts)
    exact = skeleton.variants is None and not segments
    return plain_keys and exact and graph_decoder(skeleton.model, modules) is not None


def unread_bytes(skeleton: ModelSkeleton) -> int:
    """Return the bytes of non-expert weights that decoding a token does not read.

    This is the size of the input embedding, or 0 if it is on disk or tied to the output head.
    """
    model: Any = skeleton.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = bool(model.all_tied_weights_keys)
    if embedding is None or (tied and head is not None):
        return 0
    if (stored := stored_weight(embedding)) is not None:
        return stored.nbytes
    return int(embedding.weight.numel() * skeleton.dtype.itemsize)
