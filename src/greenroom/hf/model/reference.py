"""The reference for what is streamed: the same experts by transformers' own loading code.

Nothing here uses the catalog. A quantised checkpoint is expanded by transformers' own quantiser.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
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
from greenroom.hf.checkpoint.quantised import settings_of
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.model.skeleton import LazyTensor, ModelSkeleton, conversions_of
from greenroom.runtime.encodings import ENCODINGS
from greenroom.runtime.slots.cutting import Cutting

ALIGNED = 64  # bytes: what torch's own memory is aligned to


def quantiser(checkpoint: Checkpoint) -> Any:
    """transformers' quantiser of a quantised checkpoint, told to expand it; None of others.

    UnsupportedModel where it needs a package that is not installed.
    """
    settings = settings_of(checkpoint.config)
    if settings is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        given = AutoHfQuantizer.merge_quantization_configs(dict(settings), None)
        given.dequantize = True
        made = AutoHfQuantizer.from_config(given, pre_quantized=True)
        made.validate_environment()
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"{checkpoint.folder}: transformers says: {reason}") from error
    return made


def transformers_can_load(checkpoint: Checkpoint) -> bool:
    """Whether transformers can load it as gguf expands it: of a GGUF in parts it reads only one, of
    gpt-oss's it finds no gate and no up projection, qwen35moe's it expands in the model's type,
    rounding at every step, for all it needs accelerate; and it knows no packs."""
    if checkpoint.pack is not None:
        return False
    if not isinstance(checkpoint, GgufCheckpoint):
        return True
    if len(checkpoint.files) > 1 or checkpoint.architecture == "gpt-oss" or checkpoint.mapped:
        return False
    return find_spec("accelerate") is not None


def load_reference_model(skeleton: ModelSkeleton) -> PreTrainedModel:
    """The full model, as `from_pretrained` loads it, computed by eager; takes all of its memory."""
    checkpoint, options = skeleton.checkpoint, {}
    if (quantised := quantiser(checkpoint)) is not None:
        options["quantization_config"] = quantised.quantization_config
    adapter = adapter_of(skeleton.model)
    if adapter is not None and adapter.config_part:
        whole = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        options["config"] = getattr(whole, adapter.config_part)
        options["key_mapping"] = dict(adapter.renames)
    if isinstance(checkpoint, GgufCheckpoint):
        from transformers.utils.quantization_config import GgufConfig

        options["config"] = checkpoint.hf_config()
        options["quantization_config"] = GgufConfig(dequantize=True)
    model: PreTrainedModel = type(skeleton.model).from_pretrained(
        **checkpoint.pretrained_arguments,
        **options,
        dtype=skeleton.dtype,
        experts_implementation="eager",
    )
    if quantised is not None and adapter is None:
        for one in (one for layer in skeleton.layers for one in layer):
            expert = model.get_parameter(one.full_name)  # compressed-tensors: in its scales' type
            expert.data = expert.data.to(one.dtype)
    return align_weights(model.eval())


def align_weights(model: PreTrainedModel) -> PreTrainedModel:
    """With weights at multiples of ALIGNED bytes, as ours are.

    transformers maps some from their file, where they lie at any address, and MKL on processors
    that are not Intel's gives products of float32 other last bits then.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % ALIGNED:
            weight.data = weight.data.clone()
    return model


def load_reference_experts(skeleton: ModelSkeleton, layer: int) -> dict[str, Tensor]:
    """One layer's whole expert parameters [experts, ...] by name.

    Takes the layer's whole size in memory; the skeleton must not be loaded after this.
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
        made = {
            one.name: _by_gguf(skeleton, checkpoint, conversions[one.full_name]) for one in streamed
        }
    else:
        _by_transformers(skeleton, conversions, {one.full_name for one in streamed})
        made = {one.name: getattr(module, one.name).data for one in streamed}
    for one in streamed:
        module.register_parameter(one.name, None)
    # What compressed-tensors expands, transformers leaves in the type of its scales.
    return {one.name: made[one.name].to(one.dtype) for one in streamed}


def _by_transformers(
    skeleton: ModelSkeleton, conversions: dict[str, WeightConversion], wanted: set[str]
) -> None:
    """Have transformers load some parameters, which the routes lead to."""
    model, checkpoint = skeleton.model, skeleton.checkpoint
    sources = [
        name
        for conversion in conversions.values()
        if wanted.intersection(conversion.targets)
        for names in conversion.sources.values()
        for name in names
    ]
    options = skeleton.options(quantiser(checkpoint))
    info, _ = type(model)._load_pretrained_model(
        model, _as_stored(checkpoint, sources), None, options, expected_keys=sorted(wanted)
    )
    if info.conversion_errors:
        raise CheckpointError(f"{checkpoint.folder}: {next(iter(info.conversion_errors))}")


def _by_gguf(
    skeleton: ModelSkeleton, checkpoint: GgufCheckpoint, conversion: WeightConversion
) -> Tensor:
    """One parameter, expanded by gguf and joined as transformers joins it."""
    import gguf  # only here: what reads no GGUF must not need it

    tensors = {}
    for name in (name for own in conversion.sources.values() for name in own):
        stored = checkpoint.stored[name]
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
        tensors[name] = values.view(stored.shape).float()
    (target,) = conversion.targets
    return conversion.convert(tensors, skeleton.model, skeleton.model.config)[target]


def _as_stored(checkpoint: Checkpoint, names: list[str]) -> dict[str, LazyTensor]:
    """What the files hold for some tensors, under the names there."""

    def place(stored: StoredTensor) -> tuple[int, int]:
        return stored.file, stored.offset

    wanted = set()
    for name in names:
        stored = checkpoint.tensors[name]
        wanted |= {place(stored), *map(place, stored.companions)}
    return {
        name: LazyTensor(partial(checkpoint.read_stored, name), NAMES[stored.dtype])
        for name, stored in checkpoint.stored.items()
        if place(stored) in wanted
    }


def expand_packed_experts(skeleton: ModelSkeleton, pack: Pack, layer: int) -> dict[str, Tensor]:
    """One layer's whole expert parameters [experts, ...] by name: the reference for a pack.

    Read with nothing but the header, and expanded by the encodings' decoders.
    """
    stored = pack.header.layers[layer]
    made = {}
    for streamed in skeleton.layers[layer]:
        weight = stored.layout.weight(streamed.name)
        module = skeleton.model.get_submodule(streamed.module)
        transposed, cutting = module.is_transposed, Cutting.of(module, stored.layout)
        full = torch.empty(streamed.shape, dtype=streamed.dtype)
        for expert in range(stored.experts):
            w = _matrix(pack, stored, expert, weight, streamed.dtype, cutting)
            full[expert] = w.T if transposed and weight.encoding != PLAIN else w
        made[streamed.name] = full
    return made


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
            rest = _tensor(stream, begin, layer.low_copy.remainder[weight.name])
            low = layer.low_copy.layout.weight(weight.name).parts
            high, scale = (_tensor(stream, layer.place(expert), spec) for spec in low)
            parts = [*join_planes(high, rest, scale)]
            return ENCODINGS[weight.encoding].decode(parts, weight.shape, dtype)
        for spec in weight.parts:
            each = [(s.offset, s.layout[spec.name]) for s in layer.layout.segments]
            found = [_tensor(stream, begin + at, own) for at, own in each]
            if found:
                parts.append(cutting.joined(spec, found))
            else:
                parts.append(_tensor(stream, begin, spec))
    if weight.encoding == PLAIN:
        return parts[0]
    return ENCODINGS[weight.encoding].decode(parts, weight.shape, dtype)


def _tensor(stream: BinaryIO, begin: int, spec: TensorSpec) -> Tensor:
    stream.seek(begin + spec.offset)
    raw = torch.frombuffer(bytearray(stream.read(spec.nbytes)), dtype=torch.uint8)
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)
