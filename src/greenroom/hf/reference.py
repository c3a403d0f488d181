"""The reference for what is streamed: the same experts by transformers' own loading code.

Nothing here uses the catalog. A quantised checkpoint is expanded by transformers' own quantiser.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer

from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.adapters import adapter_of
from greenroom.hf.build import Draft
from greenroom.hf.checkpoint import Checkpoint
from greenroom.hf.header import DTYPES, Stored
from greenroom.hf.quantised import settings_of
from greenroom.hf.routes import find_routes


def quantiser(checkpoint: Checkpoint) -> Any:
    """transformers' quantiser of a quantised checkpoint, told to expand it; None of others.

    UnsupportedModel where it needs a package that is not installed.
    """
    settings = settings_of(checkpoint.config)
    if settings is None:
        return None
    try:
        given = AutoHfQuantizer.merge_quantization_configs(dict(settings), None)
        given.dequantize = True
        made = AutoHfQuantizer.from_config(given, pre_quantized=True)
        made.validate_environment()
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"{checkpoint.folder}: transformers says: {reason}") from error
    return made


def whole_model(draft: Draft) -> PreTrainedModel:
    """The full model, as `from_pretrained` loads it, computed by eager; takes all of its memory."""
    quantised = quantiser(draft.checkpoint)
    model: PreTrainedModel = type(draft.model).from_pretrained(
        draft.checkpoint.folder,
        dtype=draft.dtype,
        experts_implementation="eager",
        local_files_only=True,
        **({} if quantised is None else {"quantization_config": quantised.quantization_config}),
    )
    return model.eval()


def load_experts(draft: Draft, layer: int) -> dict[str, Tensor]:
    """One layer's whole expert parameters [experts, ...] by name.

    Takes the layer's whole size in memory; the draft is not to be loaded after this.
    """
    model, checkpoint, streamed = draft.model, draft.checkpoint, draft.layers[layer]
    module = model.get_submodule(streamed[0].module)
    for one in streamed:
        empty = torch.empty(one.shape, dtype=one.dtype, device="meta")
        module.register_parameter(one.name, nn.Parameter(empty, requires_grad=False))
    wanted = {one.full_name for one in streamed}
    routes, _ = find_routes(model, checkpoint.tensors)
    sources = [
        name
        for route in routes.values()
        if wanted.intersection(route.targets)
        for names in route.sources.values()
        for name in names
    ]
    quantised, adapter = quantiser(checkpoint), adapter_of(model)
    mapping = get_model_conversion_mapping(model, None, quantised)
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=str(checkpoint.folder),
        dtype=draft.dtype,
        dtype_plan=model._get_dtype_plan(draft.dtype),
        weight_mapping=mapping if adapter is None else adapter.conversions(mapping),
        hf_quantizer=quantised,
        use_safetensors=True,
    )
    info, _ = type(model)._load_pretrained_model(
        model, _as_stored(checkpoint, sources), None, options, expected_keys=sorted(wanted)
    )
    if info.conversion_errors:
        raise CheckpointError(f"{checkpoint.folder}: {next(iter(info.conversion_errors))}")
    loaded = {one.name: getattr(module, one.name).data for one in streamed}
    for one in streamed:
        module.register_parameter(one.name, None)
    return loaded


def _as_stored(checkpoint: Checkpoint, names: list[str]) -> dict[str, _Lazy]:
    """What the files hold for some tensors, under the names there."""

    def place(stored: Stored) -> tuple[int, int]:
        return stored.file, stored.offset

    wanted = set()
    for name in names:
        stored = checkpoint.tensors[name]
        wanted |= {place(stored), *map(place, stored.companions)}
    return {
        name: _Lazy(checkpoint, name)
        for name, stored in checkpoint.stored.items()
        if place(stored) in wanted
    }


class _Lazy:
    """Stands for a tensor until transformers asks for its values with `tensor[...]`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def get_dtype(self) -> str:
        """As safetensors spell it."""
        dtype = self._checkpoint.stored[self._name].dtype
        return next(name for name, (torch_name, _) in DTYPES.items() if torch_name == dtype)

    def __getitem__(self, whole: object) -> Tensor:
        return self._checkpoint.read_stored(self._name)
