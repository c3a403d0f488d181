"""Add a checkpoint's MTP layer to its model on the meta device.

The layer is transformers' `MtpLayer`: norms and a projection that join a hidden state with the
embedding of the next token, and a decoder layer, whose routed experts stay on disk like others.
Input embedding, output head and rotary embedding are those of the model. transformers' own
`MtpModel` would load all experts into memory.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpLayer

from greenroom.core.layout import Catalog
from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.library_errors import wrap_library_errors

NAME = "mtp_layer"  # attribute of the model
LOOKUP_INSTEAD = "leave out --speculate mtp, or use --speculate lookup"
# Parts of a checkpoint's layer that lie outside of its decoder layer, and their names in MtpLayer.
AROUND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}


def mtp_layer_of(model: Any) -> Any:
    """Return a model's MTP layer; None if none was added."""
    return getattr(model, NAME, None)


def add_mtp_layer(model: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Add the first MTP layer of a checkpoint to its model.

    The model is on the meta device, and computes in `dtype`. Raises UnsupportedModel if the
    checkpoint has none, or the architecture's cannot be used.
    """
    config, prefix = model.config.get_text_config(), _prefix(model)
    refusal = f"{checkpoint.folder}: --speculate mtp"
    if not getattr(config, "num_mtp_layers", None) or hasattr(config, "chain_hidden_post_norm"):
        raise UnsupportedModel(
            f"{refusal} does not work with {type(model).__name__}: {LOOKUP_INSTEAD}"
        )
    if checkpoint.pack is not None or isinstance(checkpoint, GgufCheckpoint):
        raise UnsupportedModel(
            f"{refusal} needs the original checkpoint, a folder of safetensors files, since packs"
            f" and GGUF files have no MTP layer that can be used: {LOOKUP_INSTEAD}"
        )
    if f"{prefix}eh_proj.weight" not in checkpoint.tensors:
        raise UnsupportedModel(
            f"{refusal} needs an MTP layer, but the checkpoint has no weights of one"
            f" ({prefix}eh_proj.weight): {LOOKUP_INSTEAD}"
        )
    last = model.get_decoder().layers[-1]
    norm = next(type(part) for name, part in last.named_modules() if "norm" in name)
    with wrap_library_errors(f"{refusal} does not work with this config", UnsupportedModel):
        layer_config = config.get_mtp_config()
        layer_config._experts_implementation = config._experts_implementation
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                layer = MtpLayer(layer_config, type(last), norm, 0)
        finally:
            torch.set_default_dtype(before)
    setattr(model, NAME, layer)


def renamings(model: PreTrainedModel) -> list[WeightRenaming]:
    """Return how a checkpoint names the tensors of a model's MTP layer, for transformers' loader.

    Empty if the model has none.
    """
    if mtp_layer_of(model) is None:
        return []
    prefix = "^" + re.escape(_prefix(model))
    outside = "|".join(map(re.escape, (*AROUND, "embed_tokens", "shared_head")))
    parts = {f"{prefix}{re.escape(name)}\\.": f"{NAME}.{part}." for name, part in AROUND.items()}
    parts[rf"{prefix}(?!(?:{outside})\.)"] = f"{NAME}.mtp_block."
    return [WeightRenaming(source, target) for source, target in parts.items()]


def without_mtp(catalog: Catalog) -> Catalog:
    """Return a catalog without the MTP layer, for predictors of a pass's experts."""
    if not next(reversed(catalog.layers), "").startswith(f"{NAME}."):
        return catalog
    return Catalog(
        catalog.files,
        catalog.layers[:-1],
        catalog.offsets[:-1],
        catalog.layouts[:-1],
        catalog.locate,
    )


def _prefix(model: Any) -> str:
    """Return the beginning of the checkpoint's names of the first MTP layer's tensors."""
    return f"model.layers.{model.config.get_text_config().num_hidden_layers}."
