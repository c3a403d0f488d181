"""Build a model whose experts stay on disk while all other weights are in memory.

skeleton = ModelSkeleton.of(folder)  # reads config and headers only, no weights
skeleton.dense_bytes                 # bytes that `load` takes
model = skeleton.load()              # weights other than experts, as `from_pretrained` loads them
skeleton.catalog                     # byte ranges of the experts in the checkpoint's files
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import LoadStateDictConfig, _get_dtype
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from greenroom.core.layout import FLOATS, Catalog
from greenroom.errors import CheckpointError, UnknownName, UnsupportedModel
from greenroom.hf.adapters import adapt, weight_transforms
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.exported_parts import check_exported_parts
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.library_errors import (
    bounded_construction,
    check_layers,
    wrap_library_errors,
)
from greenroom.hf.checkpoint.resolve import open_checkpoint
from greenroom.hf.index.conversions import TargetDtypes, WeightConversion, find_conversions
from greenroom.hf.index.experts import StreamedParameter, detach_experts, find_streamed_parameters
from greenroom.hf.index.gguf.conversions import gguf_conversions
from greenroom.hf.model.architectures import class_of
from greenroom.hf.model.construction import construct, load_generation_config, remove_towers
from greenroom.hf.model.dense import (
    TableParameter,
    find_encoded_parameters,
    find_table_parameters,
)
from greenroom.hf.model.encoded import EncodedParameter, JoinedParameter
from greenroom.hf.model.implementation import IMPLEMENTATION
from greenroom.hf.model.lazy import LazyTensor, decode_gguf
from greenroom.hf.mtp.layer import add_mtp_layer
from greenroom.hf.variants.catalog import ExpertVariants
from greenroom.hf.variants.index import NO_ADAPTERS, Adapters, index_experts
from greenroom.hf.variants.subset import ExpertSubset, Only, check_subset
from greenroom.json_file import printable
from greenroom.runtime.cuda.engine import device_errors
from greenroom.runtime.memory.arena import TensorArena

log = logging.getLogger(__name__)

READERS = 4  # threads that read dense matrices

DenseParameter = EncodedParameter | JoinedParameter | TableParameter


@dataclass
class ModelSkeleton:
    """A model on the meta device, without its expert parameters.

    `load` reads all weights but the experts into memory. `catalog` has the byte ranges of the
    experts in the checkpoint's files.
    """

    checkpoint: Checkpoint
    catalog: Catalog
    model: PreTrainedModel
    dtype: torch.dtype
    layers: list[list[StreamedParameter]]  # the detached expert parameters
    _conversions: dict[str, WeightConversion]  # of the dense parameters
    _names: list[str]  # of all parameters, experts included
    _unused: list[str] = field(default_factory=list)  # tensors that no parameter needs
    # dense parameters that stay encoded in memory, or stay on disk
    _encoded: dict[str, DenseParameter] = field(default_factory=dict)
    subset: ExpertSubset | None = None  # the experts in the catalog; None: all
    variants: ExpertVariants | None = None  # of the experts in the catalog, where there are several

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str] | Checkpoint,
        dtype: str = "auto",
        mtp: bool = False,
        adapters: Adapters = NO_ADAPTERS,
        only: Only = None,
    ) -> ModelSkeleton:
        """Build a checkpoint's model on the meta device, and index its experts' byte ranges.

        Only config and tensor headers are read. `dtype` is "auto" (that of the config, else of the
        weights), "bfloat16", "float16" or "float32"; `mtp` adds the MTP layer; `adapters` change
        experts; `only` leaves out all other experts. Raises NotAModel, NotMoE, UnsupportedModel,
        CheckpointError, or UnknownName for another dtype.
        """
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        with wrap_library_errors(
            f"{checkpoint.folder}: cannot build a model from its config and tensors"
        ):
            return cls._of(checkpoint, dtype, mtp, adapters, only)

    @classmethod
    def _of(
        cls, checkpoint: Checkpoint, dtype: str, mtp: bool, adapters: Adapters, only: Only
    ) -> ModelSkeleton:
        config = _config(checkpoint)
        kind, config = class_of(config)
        config.name_or_path = str(checkpoint.folder)  # the config of a text part has no path
        main = _dtype(dtype, checkpoint, config)
        with bounded_construction(len(checkpoint.tensors), str(checkpoint.folder)):
            model = construct(kind, config, main, IMPLEMENTATION)
        if isinstance(checkpoint, GgufCheckpoint):
            remove_towers(model)
        if warning := adapt(model):
            log.warning("%s", warning)
        if mtp:
            add_mtp_layer(model, checkpoint, main)
        dtypes = TargetDtypes(model._get_dtype_plan(main))
        layers = find_streamed_parameters(model, dtypes)
        subset = ExpertSubset.of_header(checkpoint.pack.header) if checkpoint.pack else None
        layers = subset.reduce_parameters(layers) if subset else layers
        conversions, unused = conversions_of(model, checkpoint)
        checkpoint, catalog, variants = index_experts(
            model, checkpoint, conversions, layers, adapters
        )
        if only is not None:
            subset = check_subset(model, checkpoint, catalog, only)
            catalog, layers = subset.reduce(catalog, layers)
        streamed = {s.full_name for layer in layers for s in layer}
        names = list(model.state_dict())
        detach_experts(model, layers)
        dense = {k: r for k, r in conversions.items() if not streamed.intersection(r.targets)}
        skeleton = cls(checkpoint, catalog, model, main, layers, dense, names, unused)
        skeleton.variants, skeleton.subset = variants, subset
        skeleton._check_dense()
        _report_unused(model, unused)
        return skeleton

    def keep_dense_encoded(self) -> None:
        """Keep matrices quantised in memory if compiled kernels can read their encoding.

        Experts are not affected. Call this method at most once, before `load`. The layers of these
        matrices cannot compute until compiled kernels are installed
        (runtime/kernels/dense/accelerate.py).
        """
        self._detach_dense(
            find_encoded_parameters(self.model, self.checkpoint, self._conversions, self.dtype)
        )

    def keep_tables_on_disk(self, least: int) -> None:
        """Keep embeddings with at least `least` bytes on disk; a pass reads its tokens' rows.

        Call this method at most once, before `keep_dense_encoded` and `load`.
        """
        dtypes = TargetDtypes(self.model._get_dtype_plan(self.dtype))
        self._detach_dense(
            find_table_parameters(self.model, self.checkpoint, self._conversions, dtypes, least)
        )

    def _detach_dense(self, parameters: Mapping[str, DenseParameter]) -> None:
        for target, one in parameters.items():
            one.detach(self.model)
            del self._conversions[target]
        self._encoded |= parameters

    @property
    def dense_bytes(self) -> int:
        """Bytes in memory of all parameters and buffers but the experts; tied ones count once."""
        dtypes = TargetDtypes(self.model._get_dtype_plan(self.dtype))
        tied = set(self.model.all_tied_weights_keys)
        loaded = self.model.state_dict()
        total: int = sum(b.nbytes for name, b in self.model.named_buffers() if name not in loaded)
        total += sum(one.stored.nbytes for one in self._encoded.values())
        for name, tensor in loaded.items():
            if name not in tied:
                total += tensor.numel() * dtypes(name, tensor.dtype).itemsize
        return total

    @property
    def loaded_tensors(self) -> list[str]:
        """Names of the checkpoint's tensors that `load` reads: dense_tensors without tables."""
        conversions = self._conversions.values()
        names = [
            name
            for conversion in conversions
            for group in conversion.sources.values()
            for name in group
        ]
        encoded = (one for one in self._encoded.values() if not isinstance(one, TableParameter))
        return names + [name for one in encoded for name in one.tensors]

    @property
    def dense_tensors(self) -> list[str]:
        """Names of the checkpoint's tensors for all parameters but the experts."""
        tables = (one for one in self._encoded.values() if isinstance(one, TableParameter))
        return self.loaded_tensors + [name for one in tables for name in one.tensors]

    @property
    def expanded_bytes(self) -> int:
        """Bytes of all experts, dequantised to the model's dtype as transformers loads them."""
        return sum(prod(s.shape) * s.dtype.itemsize for layer in self.layers for s in layer)

    def load(self, device: str | torch.device = "cpu") -> PreTrainedModel:
        """Read all weights but the experts into memory, and move the model to a device.

        Call this method once. The model is then in evaluation mode, and its expert parameters are
        None. All other parameters and buffers equal those of `from_pretrained`, except matrices
        that stay quantised or on disk. Raises CheckpointError if reading fails, and DeviceError if
        memory or address space does not suffice.
        """
        model, options = self.model, self.options()
        check_exported_parts(self.checkpoint, self._unused)
        tied = model.all_tied_weights_keys
        encoded = {f"{name}.weight" for one in self._encoded.values() for name in one.modules}
        model.all_tied_weights_keys = {k: v for k, v in tied.items() if k not in encoded}
        info, _ = type(model)._load_pretrained_model(
            model, self._lazy_tensors(options), None, options, expected_keys=self._names
        )
        self._check_loaded(info)
        type(model)._finalize_model_loading(model, options, info)
        model.all_tied_weights_keys = tied
        self._load_encoded()
        if self.subset is not None:
            self.subset.restrict(model)
        model.eval().set_use_kernels(False, None)
        if not isinstance(self.checkpoint, GgufCheckpoint):  # a GGUF file has no generation config
            load_generation_config(model, self.checkpoint.folder)
        if torch.device(device).type != "cpu":
            with device_errors("the dense parts"):
                model.to(device)
        return model

    def _load_encoded(self) -> None:
        """Read the matrices that stay quantised, in a few threads."""
        arena = TensorArena()  # separate, since `detach` frees these before the others
        with ThreadPoolExecutor(READERS) as pool:
            reads = [
                pool.submit(one.load, self.checkpoint, arena.empty)
                for one in self._encoded.values()
            ]
            try:
                for read in reads:
                    read.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def options(self, quantiser: Any = None) -> LoadStateDictConfig:
        """Return the options for transformers' loader.

        `quantiser` is transformers' quantiser for weights that must be dequantised, else None.
        """
        # There is no device map: with one, transformers looks up every expected name, experts
        # included, to reserve memory. Moving the model later also moves tensors that are no
        # parameters.
        is_gguf = isinstance(self.checkpoint, GgufCheckpoint)
        return LoadStateDictConfig(
            pretrained_model_name_or_path=str(self.checkpoint.folder),
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=[] if is_gguf else weight_transforms(self.model, quantiser),
            hf_quantizer=quantiser,
            use_safetensors=True,
        )

    def _lazy_tensors(self, options: LoadStateDictConfig) -> dict[str, LazyTensor]:
        """Return lazy tensors for all weights but the experts, named for transformers' loader."""
        dtypes, constructed = TargetDtypes(options.dtype_plan), self.model.state_dict()
        checkpoint, empty = self.checkpoint, TensorArena().empty
        tensors: dict[str, LazyTensor] = {}
        for target, conversion in self._conversions.items():
            dtype = dtypes(target, constructed[target].dtype)
            names = [name for group in conversion.sources.values() for name in group]
            if isinstance(checkpoint, GgufCheckpoint):  # names that transformers does not know
                read = partial(decode_gguf, checkpoint, conversion, names, self.model, dtype, empty)
                tensors[target] = LazyTensor(read)
                continue
            into = empty if conversion.converter is None else torch.empty
            for name in names:
                tensors[name] = LazyTensor(partial(checkpoint.read, name, dtype, into))
        return tensors

    def _check_dense(self) -> None:
        """Check names and shapes of the checkpoint's tensors for all parameters but the experts."""
        model, folder = self.model, self.checkpoint.folder
        expected = model.state_dict()
        present = {
            target for conversion in self._conversions.values() for target in conversion.targets
        }
        tied: dict[str, set[str]] = {}
        for target, source in model.all_tied_weights_keys.items():
            tied.setdefault(source, {source}).add(target)
        for group in tied.values():
            if group & present:
                present |= group
        optional = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["(?!)"]))
        missing = [name for name in expected if name not in present and not optional.search(name)]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{folder}: the tensor {missing[0]} is missing{more}: download the model again"
            )
        for target, conversion in self._conversions.items():
            if conversion.converter is None:
                name = next(iter(conversion.sources))
                stored = self.checkpoint.tensors[name]
                if stored.shape != tuple(expected[target].shape):
                    raise CheckpointError(
                        f"{self.checkpoint.files[stored.file]}: {name} has shape"
                        f" {list(stored.shape)}, but the config says {list(expected[target].shape)}"
                    )

    def _check_loaded(self, info: Any) -> None:
        """Raise CheckpointError for errors that only the conversion of weights could find."""
        folder = self.checkpoint.folder
        if info.conversion_errors:
            name = next(iter(info.conversion_errors))
            raise CheckpointError(
                f"{folder}: the tensors for {name} do not have the shapes that the config says:"
                " download the model again"
            )
        if info.mismatched_keys:
            name, got, expected = sorted(info.mismatched_keys)[0]
            raise CheckpointError(
                f"{folder}: {name} has shape {list(got)}, but the config says {list(expected)}"
            )


def conversions_of(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> tuple[dict[str, WeightConversion], list[str]]:
    """Find how each parameter is made from a checkpoint's tensors.

    Returns (conversions by parameter name, names of tensors that no parameter uses).
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return gguf_conversions(model, checkpoint), []
    return find_conversions(model, checkpoint.tensors)


def _config(checkpoint: Checkpoint) -> PreTrainedConfig:
    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.hf_config()
    raw, path = checkpoint.config, checkpoint.folder / "config.json"
    kind = raw["model_type"]
    if kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UnsupportedModel(
                f"{path}: the model type {printable(kind)} needs code from the model's"
                " repository, which Greenroom never runs"
            )
        raise UnsupportedModel(
            f"{path}: the installed transformers does not know the model type {printable(kind)}"
        )
    check_layers(raw, len(checkpoint.tensors), str(path))
    with wrap_library_errors(f"{path}: not a valid {kind} config"):
        config = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):  # the model's modules are plain ones
            del part.quantization_config
    return config


def _dtype(dtype: str, checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype:
    """Choose a model's dtype and write it to the config, like `from_pretrained`."""
    if dtype != "auto" and dtype not in FLOATS:
        raise UnknownName("dtype", dtype, ["auto", *FLOATS])
    if dtype == "auto" and checkpoint.pack is not None:
        dtype = checkpoint.pack.header.dtype
    if dtype == "auto" and isinstance(checkpoint, GgufCheckpoint):
        dtype = checkpoint.dtype()
    main: torch.dtype
    _, main = _get_dtype(dtype, list(checkpoint.files), config, None, None, True)
    if str(main)[6:] not in FLOATS:
        raise UnsupportedModel(
            f"{checkpoint.folder}: the checkpoint's dtype {str(main)[6:]} is not supported: set"
            f" --dtype to one of {', '.join(FLOATS)}"
        )
    return main


def _report_unused(model: PreTrainedModel, unused: list[str]) -> None:
    """Log checkpoint tensors that a model does not use, unless ignored on purpose."""
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or []), "inv_freq"]))
    if odd := [name for name in unused if not ignored.search(name)]:
        log.warning(
            "%s has no parameters for %d of the checkpoint's tensors, such as %s: they are ignored",
            type(model).__name__,
            len(odd),
            odd[0],
        )
