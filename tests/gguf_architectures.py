"""Tiny models of the MoE architectures, as llama.cpp's own converter writes them.

    model = original(FOLDER / "qwen3_moe")      # what the converter was given

tests/data/gguf/architectures has a folder a model type: config.json and model.gguf. Weights follow
from the parameters' names, so a test makes the same model again. make.py in tests/data/gguf made
the files.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from greenroom.hf.index.conversions import TargetDtypes
from greenroom.hf.model.architectures import class_of

FOLDER = Path(__file__).parent / "data" / "gguf" / "architectures"
MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALE = 1 / 8  # of MXFP4 experts


def names() -> list[str]:
    """The model types that the folder has."""
    return sorted(path.parent.name for path in FOLDER.glob("*/model.gguf"))


def original(folder: Path, **changes: Any) -> PreTrainedModel:
    """The text model that the converter was given, in bfloat16, computed eagerly.

    `changes` are other values of the config, which leave the weights as they are.
    """
    config = AutoConfig.from_pretrained(folder)
    if type(text := config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING:
        text.tie_word_embeddings = config.tie_word_embeddings
        config = text
    kind, config = class_of(config)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    config._experts_implementation = "eager"
    model = kind._from_config(config, dtype=torch.bfloat16)
    dtypes = TargetDtypes(model._get_dtype_plan(torch.bfloat16))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in model.state_dict():
            tensor.data = tensor.to(dtypes(name, tensor.dtype))  # some stay in float32
    return fill(model).eval()


@torch.no_grad()
def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Give each parameter, and each buffer that is saved, values that follow from its name.

    bfloat16 holds them exactly. Norms are near one, as in trained models, but none is one.
    """
    experts = r"\.experts\." if model.config.model_type == "deepseek_v4" else r"$^"
    for name, tensor in model.state_dict().items():
        wanted = values(name, tuple(tensor.shape))
        if name.endswith("tid2eid"):  # DeepSeek-V4's experts of each token
            wanted = torch.arange(tensor.numel()).reshape(tensor.shape) * 7 % 4
        elif not tensor.is_floating_point():  # Qwen4's hash of n-grams: odd factors, sizes, offsets
            wanted = tensor + 2 if name.endswith("multipliers") else tensor
        elif re.search(experts, name):
            wanted = snap(wanted)
        if name not in model.all_tied_weights_keys:
            tensor.copy_(wanted)
    model.tie_weights()
    return model


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a parameter: the same with and without towers around the text model."""
    seed = zlib.crc32(re.sub(r"^thinker\.|language_model\.", "", name).encode())
    noise = np.random.default_rng(seed).standard_normal(shape, np.float32)
    is_norm = len(shape) == 1 and name.endswith("weight")
    exact = torch.from_numpy(1 + 0.1 * noise if is_norm else 0.2 * noise)
    return exact.to(torch.bfloat16).float()


def snap(tensor: Tensor) -> Tensor:
    """The nearest values that MXFP4 has with the scale SCALE."""
    codes = (tensor.abs().unsqueeze(-1) / SCALE - MXFP4).abs().argmin(-1)
    return MXFP4[codes] * SCALE * tensor.sign()
