"""Tiny checkpoints of integers in groups with zeros, and the same models expanded.

Each maker writes a quantised checkpoint to FOLDER, and to FOLDER/expanded the checkpoint of the
weights that the format's own tool dequantises: compressed-tensors' compressor; for AWQ and GPTQ
the arithmetic of AutoAWQ's `dequantize_gemm` and GPTQModel's `dequantize_weight` on tensors packed
here as these tools pack them, one number at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

from tests.quantised import WIDE, Tensors, plain, save

ONES = {4: 0x11111111, 8: 0x01010101}  # what GPTQ's old format subtracts from eight or four zeros
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: Tensor, bits: int, order: tuple[int, ...] = tuple(range(32))) -> Tensor:
    """Integers [rows, n] packed along n into int32, `order` from the lowest bits up."""
    per, numbers = 32 // bits, codes.numpy().astype(np.uint32)
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per), np.uint32)
    for place in range(per):
        words |= numbers[:, order[place] :: per] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def quantised(
    w: Tensor, groups: Tensor, bits: int, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [in, out], float16 scales [groups, out] and zeros [groups, out] of w [out, in].

    groups: the group of each input
    """
    top, rows = (1 << bits) - 1, w.T.float()
    scales, zeros = [], []
    for g in range(int(groups.max()) + 1):
        some = rows[groups == g]
        low, high = some.amin(0).clamp_max(0), some.amax(0).clamp_min(0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).half()
        scales.append(scale)
        zero = (-low / scale.float()).round().clamp(0, top)
        zeros.append(torch.full_like(zero, (top + 1) // 2) if symmetric else zero)
    scale, zero = torch.stack(scales), torch.stack(zeros)
    codes = (rows / scale.float()[groups] + zero[groups]).round().clamp(0, top)
    return codes.to(torch.int32), scale, zero.to(torch.int32)


def write(
    folder: Path,
    convert: Callable[[str, Tensor], tuple[Tensors, Tensor]],
    settings: dict[str, Any],
    name: str = "qwen3_moe",
    **overrides: Any,
) -> Path:
    """Quantise every projection: `convert` returns its stored tensors and its dequantised value."""
    tensors, wide = plain(folder, name, **{**WIDE, **overrides}), {}
    stored: Tensors = {}
    for key, w in tensors.items():
        if key.endswith("_proj.weight"):
            parts, value = convert(key, w)
            stored |= {f"{key.removesuffix('weight')}{part}": t for part, t in parts.items()}
            wide[key] = value.to(w.dtype)
        else:
            stored[key] = wide[key] = w
    shutil.copytree(folder, folder / "expanded")
    save_file(
        {k: v.contiguous() for k, v in wide.items()}, folder / "expanded" / "model.safetensors"
    )
    return save(folder, stored, settings)


def gptq(
    folder: Path,
    bits: int = 4,
    group: int = 32,
    form: str = "gptq",
    ordered: bool = False,
    symmetric: bool = False,
    **overrides: Any,
) -> Path:
    random = torch.Generator().manual_seed(0)

    def convert(key: str, w: Tensor) -> tuple[Tensors, Tensor]:
        inputs = w.shape[1]
        index = torch.arange(inputs) // (inputs if group == -1 else group)
        if ordered:  # gate and up have the same inputs, but their own order here
            index = index[torch.randperm(inputs, generator=random)]
        codes, scale, zero = quantised(w, index, bits, symmetric)
        value = (scale[index] * (codes - zero[index])).T
        parts = {
            "qweight": packed(codes.T, bits).T,
            "qzeros": packed(zero, bits) - int(form == "gptq") * ONES[bits],
            "scales": scale,
            "g_idx": index.to(torch.int32),
        }
        return parts, value

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered}
    settings |= {"sym": symmetric, "checkpoint_format": form}
    return write(folder, convert, settings, **overrides)


def awq(folder: Path, group: int = 32, **overrides: Any) -> Path:
    def convert(key: str, w: Tensor) -> tuple[Tensors, Tensor]:
        index = torch.arange(w.shape[1]) // group
        codes, scale, zero = quantised(w, index, 4)
        value = ((codes - zero[index]) * scale[index]).T
        parts = {
            "qweight": packed(codes, 4, AWQ_ORDER),
            "qzeros": packed(zero, 4, AWQ_ORDER),
            "scales": scale,
        }
        return parts, value

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    settings |= {"version": "gemm", "modules_to_not_convert": None}
    return write(folder, convert, settings, **overrides)


def compressed_integers(
    folder: Path,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = False,
    form: str = "pack-quantized",
    scales: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """As compressed-tensors' own compressor writes and expands them; group None: a scale a row."""
    arguments = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    arguments |= {"strategy": "channel" if group is None else "group"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    packer = BaseCompressor.get_value_from_registry(form)

    def convert(key: str, w: Tensor) -> tuple[Tensors, Tensor]:
        runs = w.unflatten(1, (-1, group or w.shape[1])).float()
        low, high = runs.amin(-1).clamp_max(0), runs.amax(-1).clamp_min(0)
        if symmetric:
            low = -torch.maximum(high, -low)
            high = -low
        scale = ((high - low) / ((1 << bits) - 1)).to(scales)
        state = {"weight": w.to(scales), "weight_scale": scale}
        if not symmetric:
            half = 1 << (bits - 1)
            zero = (-low / scale.float()).round() - half
            state["weight_zero_point"] = zero.clamp(-half, half - 1).to(torch.int8)
        state = packer.compress(state, scheme)
        return state, packer.decompress(dict(state), scheme)["weight"]

    settings = {"quant_method": "compressed-tensors", "format": form}
    settings |= {"quantization_status": "compressed", "ignore": ["lm_head", "re:.*mlp.gate$"]}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    return write(folder, convert, settings, **overrides)


def change_settings(folder: Path, **changes: Any) -> Path:
    """Change values of the quantization_config in config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    return folder
