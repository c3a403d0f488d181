"""Load weights by transformers' own code, as a reference for Greenroom's experts.

Nothing here uses Greenroom's index of expert byte ranges. transformers' own quantiser dequantises a
quantised checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from greenroom.core.layout import PLAIN, TensorSpec, WeightSpec
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.adapters import adapter_of
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf_file import ggml_type
from greenroom.hf.checkpoint.header import NAMES, StoredTensor
from greenroom.hf.checkpoint.pack.copies import join_planes
from greenroom.hf.checkpoint.pack.format import DATA, PackLayer
from greenroom.hf.checkpoint.pack.reading import Pack
from greenroom.hf.checkpoint.quantised.methods import settings_of
from greenroom.hf.checkpoint.read import read_tensor
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.model.construction import construct, remove_towers
from greenroom.hf.model.lazy import LazyTensor
from greenroom.hf.model.skeleton import ModelSkeleton, conversions_of
from greenroom.runtime.encodings import decode
from greenroom.runtime.slots.cutting import Cutting

ALIGNMENT = 64  # bytes; torch aligns its own memory so


def make_quantiser(checkpoint: Checkpoint) -> Any:
    """Return transformers' quantiser, set to dequantise a checkpoint.

    None if the checkpoint is not quantised, or if transformers cannot dequantise it. Raises
    UnsupportedModel if the quantiser needs a package that is not installed.
    """
    settings = settings_of(checkpoint.config)
    if settings is None or not transformers_can_decode(checkpoint, settings):
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        config = AutoHfQuantizer.merge_quantization_configs(dict(settings), None)
        config.dequantize = True
        quantiser = AutoHfQuantizer.from_config(config, pre_quantized=True)
        quantiser.validate_environment()
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(
            f"{checkpoint.folder}: transformers cannot dequantise this checkpoint: {reason}"
        ) from error
    return quantiser


def transformers_can_decode(checkpoint: Checkpoint, settings: dict[str, Any]) -> bool:
    """Return whether transformers dequantises a quantised checkpoint on a CPU, to its values.

    Otherwise the reference has the values of Greenroom's decoders. transformers 5.23 leaves out the
    matrix scale of NVFP4 experts, and does not know experts with block scales, zeros or int8 codes
    in compressed-tensors, nor MXFP4 matrices outside of gpt-oss's stacks. It leaves AWQ and GPTQ to
    other packages. `settings` are the checkpoint's quantization_config.
    """
    method = settings.get("quant_method")
    encoded = [tensor for tensor in checkpoint.tensors.values() if tensor.encoding != PLAIN]
    if method == "mxfp4":
        return all(tensor.transposed for tensor in encoded)
    if method == "compressed-tensors":
        return not any(map(_needs_our_decoder, encoded))
    return method in ("fp8", "mxfp8")


def _needs_our_decoder(tensor: StoredTensor) -> bool:
    """Check whether transformers cannot dequantise a tensor of compressed-tensors in experts."""
    if tensor.encoding == "fp8":  # with scales for blocks, not for rows or the matrix
        return tensor.companions[0].shape[-1] > 1 or 1 < tensor.unit < tensor.shape[-2]
    int8 = tensor.encoding == "symmetric8" and tensor.dtype == "int8"
    return int8 or tensor.encoding in ("ct_nvfp4", "affine4", "affine8")


def transformers_can_load(skeleton: ModelSkeleton) -> bool:
    """Return whether transformers' own model can have a checkpoint's values in memory.

    transformers cannot read Greenroom's packs. Tensors of a GGUF file are placed by Greenroom, in
    parameters that differ from transformers' own if the architecture has an adapter.
    """
    if skeleton.checkpoint.pack is not None:
        return False
    is_gguf = isinstance(skeleton.checkpoint, GgufCheckpoint)
    return not is_gguf or adapter_of(skeleton.model) is None


def load_reference_model(skeleton: ModelSkeleton) -> PreTrainedModel:
    """Load an entire model into memory by transformers' `from_pretrained`, with eager experts.

    The tensors of a GGUF file are dequantised by the package gguf, since transformers' own GGUF
    loader knows few architectures.
    """
    checkpoint, options = skeleton.checkpoint, {}
    if isinstance(checkpoint, GgufCheckpoint):
        return _load_gguf(skeleton, checkpoint)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": checkpoint.folder,
        "local_files_only": True,
    }
    if (quantised := make_quantiser(checkpoint)) is not None:
        options["quantization_config"] = quantised.quantization_config
    adapter = adapter_of(skeleton.model)
    if adapter is not None and adapter.config_part:
        composite = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
        options["config"] = getattr(composite, adapter.config_part)
        options["key_mapping"] = dict(adapter.renames)
    if quantised is None and settings_of(checkpoint.config) is not None:
        source = {"pretrained_model_name_or_path": None, "config": skeleton.model.config}
        source["state_dict"] = {
            name: read() for name, read in _decoded(skeleton, checkpoint.tensors).items()
        }
    model: PreTrainedModel = type(skeleton.model).from_pretrained(
        **{**source, **options},
        dtype=skeleton.dtype,
        experts_implementation="eager",
    )
    if quantised is not None and adapter is None:
        for one in (one for layer in skeleton.layers for one in layer):
            expert = model.get_parameter(
                one.full_name
            )  # compressed-tensors decodes to its scales' type
            expert.data = expert.data.to(one.dtype)
    return align_weights(model.eval())


def _load_gguf(skeleton: ModelSkeleton, checkpoint: GgufCheckpoint) -> PreTrainedModel:
    """Load an entire GGUF model into memory, dequantised by the package gguf."""
    kind, options = type(skeleton.model), skeleton.options()
    config = deepcopy(skeleton.model.config)
    model = construct(kind, config, skeleton.dtype, "eager")
    remove_towers(model)
    conversions, _ = conversions_of(model, checkpoint)
    tensors = {
        target: LazyTensor(partial(_by_gguf, model, checkpoint, conversion))
        for target, conversion in conversions.items()
    }
    info, _ = kind._load_pretrained_model(
        model, tensors, None, options, expected_keys=list(model.state_dict())
    )
    kind._finalize_model_loading(model, options, info)
    return align_weights(model.eval())


def align_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's unaligned weights to addresses that are multiples of 64 bytes.

    Greenroom's weights have such addresses. transformers maps some weights from their file, at any
    address. On processors not from Intel, MKL's float32 products of unaligned weights differ in the
    last bits. Returns the model.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()
    return model


def load_reference_experts(skeleton: ModelSkeleton, layer: int) -> dict[str, Tensor]:
    """Load all expert parameters of one layer into memory by transformers' code.

    Returns tensors by parameter name; their first axis is the expert. `layer` counts MoE layers.
    Do not call `load` on the skeleton afterwards. Raises CheckpointError if transformers cannot
    convert the tensors.
    """
    checkpoint, streamed = skeleton.checkpoint, skeleton.layers[layer]
    if checkpoint.pack is not None:
        return expand_packed_experts(skeleton, checkpoint.pack, layer)
    module = skeleton.model.get_submodule(streamed[0].module)
    for one in streamed:
        empty = torch.empty(one.shape, dtype=one.dtype, device="meta")
        module.register_parameter(one.name, nn.Parameter(empty, requires_grad=False))
    conversions, _ = conversions_of(skeleton.model, checkpoint)
    if isinstance(checkpoint, GgufCheckpoint):
        tensors = {
            one.name: _by_gguf(skeleton.model, checkpoint, conversions[one.full_name])
            for one in streamed
        }
    else:
        _by_transformers(skeleton, conversions, {one.full_name for one in streamed})
        tensors = {one.name: getattr(module, one.name).data for one in streamed}
    for one in streamed:
        module.register_parameter(one.name, None)
    # transformers leaves weights of compressed-tensors in the type of their scales.
    return {one.name: tensors[one.name].to(one.dtype) for one in streamed}


def _by_transformers(
    skeleton: ModelSkeleton, conversions: dict[str, WeightConversion], targets: set[str]
) -> None:
    """Load the parameters named `targets` into the model by transformers' own loader."""
    model, checkpoint = skeleton.model, skeleton.checkpoint
    sources = [
        name
        for conversion in conversions.values()
        if targets.intersection(conversion.targets)
        for names in conversion.sources.values()
        for name in names
    ]
    quantiser = make_quantiser(checkpoint)
    if quantiser is None and settings_of(checkpoint.config) is not None:
        tensors = {name: LazyTensor(read) for name, read in _decoded(skeleton, sources).items()}
    else:
        tensors = _as_stored(checkpoint, sources)
    options = skeleton.options(quantiser)
    info, _ = type(model)._load_pretrained_model(
        model, tensors, None, options, expected_keys=sorted(targets)
    )
    if info.conversion_errors:
        raise CheckpointError(
            f"{checkpoint.folder}: transformers cannot convert its tensors to"
            f" {next(iter(info.conversion_errors))}"
        )


def _by_gguf(
    model: PreTrainedModel, checkpoint: GgufCheckpoint, conversion: WeightConversion
) -> Tensor:
    """Load one parameter: dequantised by the package gguf, converted by transformers' converter."""
    import gguf  # imported here: other formats must not need it

    tensors = {}
    for name in (name for names in conversion.sources.values() for name in names):
        stored = checkpoint.tensors[name]
        data = np.fromfile(
            checkpoint.files[stored.file], np.uint8, stored.nbytes, offset=stored.offset
        )
        if stored.encoding == PLAIN:
            values = torch.from_numpy(data).view(getattr(torch, stored.dtype))
        else:
            kind = ggml_type(stored.encoding)
            values = torch.from_numpy(
                gguf.dequantize(data.reshape(stored.codes), gguf.GGMLQuantizationType[kind])
            )
            for scale in stored.companions:
                values = values * read_tensor(checkpoint.files, name, scale)
        if values.is_floating_point():
            values = values.float()
        tensors[name] = values.view(stored.shape)
    (target,) = conversion.targets
    return conversion.convert(tensors, model, model.config)[target]


def _decoded(skeleton: ModelSkeleton, names: Iterable[str]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that read the named tensors, decoded to the model's dtype."""
    checkpoint = skeleton.checkpoint
    dtypes = {
        name: None if checkpoint.tensors[name].encoding == PLAIN else skeleton.dtype
        for name in names
    }
    return {name: partial(checkpoint.read, name, dtype) for name, dtype in dtypes.items()}


def _as_stored(checkpoint: Checkpoint, names: list[str]) -> dict[str, LazyTensor]:
    """Return lazy tensors for the stored parts of the named tensors, by names in the files."""

    def place(stored: StoredTensor) -> tuple[int, int]:
        return stored.file, stored.offset

    places = set()
    for name in names:
        stored = checkpoint.tensors[name]
        places |= {place(stored), *map(place, stored.companions)}
    return {
        name: LazyTensor(partial(checkpoint.read_stored, name), NAMES[stored.dtype])
        for name, stored in checkpoint.stored.items()
        if place(stored) in places
    }


def expand_packed_experts(skeleton: ModelSkeleton, pack: Pack, layer: int) -> dict[str, Tensor]:
    """Decode all expert parameters of one layer from a pack, without compiled code.

    The result is the reference for other decoders. The experts are located only by the pack's
    header. Returns tensors by
    parameter name; their first axis is the expert.
    """
    stored = pack.header.layers[layer]
    parameters = {}
    for streamed in skeleton.layers[layer]:
        weight = stored.layout.weight(streamed.name)
        module = skeleton.model.get_submodule(streamed.module)
        transposed, cutting = module.is_transposed, Cutting.of(module, stored.layout)
        full = torch.empty(streamed.shape, dtype=streamed.dtype)
        for expert in range(stored.experts):
            w = _matrix(pack, stored, expert, weight, streamed.dtype, cutting)
            full[expert] = w.T if transposed and weight.encoding != PLAIN else w
        parameters[streamed.name] = full
    return parameters


def _matrix(
    pack: Pack,
    layer: PackLayer,
    expert: int,
    weight: WeightSpec,
    dtype: torch.dtype,
    cutting: Cutting,
) -> Tensor:
    parts = []
    with open(pack.folder / DATA, "rb") as stream:
        begin = layer.place(expert) + (layer.low_copy.stride if layer.low_copy is not None else 0)
        if layer.low_copy is not None and layer.low_copy.nested:
            remainder = _tensor(stream, begin, layer.low_copy.remainder[weight.name])
            low = layer.low_copy.layout.weight(weight.name).parts
            high, scale = (_tensor(stream, layer.place(expert), spec) for spec in low)
            parts = [*join_planes(high, remainder, scale)]
            return decode(weight, parts, dtype)
        for spec in weight.parts:
            each = [(s.offset, s.layout[spec.name]) for s in layer.layout.segments]
            segments = [_tensor(stream, begin + at, part) for at, part in each]
            if segments:
                parts.append(cutting.join(spec, segments))
            else:
                parts.append(_tensor(stream, begin, spec))
    if weight.encoding == PLAIN:
        return parts[0]
    return decode(weight, parts, dtype)


def _tensor(stream: BinaryIO, begin: int, spec: TensorSpec) -> Tensor:
    stream.seek(begin + spec.offset)
    raw = torch.frombuffer(bytearray(stream.read(spec.nbytes)), dtype=torch.uint8)
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)
