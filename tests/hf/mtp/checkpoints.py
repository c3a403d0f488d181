"""Tiny random checkpoints of GLM-4.5's architecture with an MTP layer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny

LAYERS = 3
SIZES = {"hidden_size": 64, "head_dim": 16, "first_k_dense_replace": 1}
_KEEP: list[TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def mtp_folder(share: float = 1.0, dtype: str = "bfloat16") -> Path:
    """A checkpoint of three layers and an MTP layer, with a tokenizer.

    `share` scales what layers add to the hidden states. With a small one the next token depends on
    the last one only, and the MTP layer, which sees its embedding, predicts as the model does.
    """
    _KEEP.append(TemporaryDirectory())
    folder = Path(_KEEP[-1].name)
    tiny("glm4_moe", folder, dtype, 1, tokenizer=True, num_hidden_layers=LAYERS + 1, **SIZES)
    path = folder / "model.safetensors"
    tensors, random = load_file(path), torch.Generator().manual_seed(5)
    kind, hidden = getattr(torch, dtype), SIZES["hidden_size"]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= share
    noise = 0.1 * share * torch.randn(hidden, 2 * hidden, generator=random)
    noise[:, :hidden] += torch.eye(hidden)
    own = {
        "eh_proj.weight": noise,
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "embed_tokens.weight": torch.zeros(8, hidden),  # GLM-4.5 has these two; they are not read
        "shared_head.head.weight": torch.zeros(8, hidden),
    }
    prefix = f"model.layers.{LAYERS}."
    tensors |= {prefix + name: tensor.to(kind) for name, tensor in own.items()}
    tensors[prefix + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    edit(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return folder


def edit(folder: Path, **values: Any) -> None:
    """Change entries of a checkpoint's config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("num_mtp_layers", None)
    path.write_text(json.dumps(config | values))
