"""Tiny quantised checkpoints, each written by its format's reference tool.

folder = fp8(tmp_path)          # transformers' Fp8Quantize
folder = mxfp4(tmp_path)        # compressed-tensors' own: transformers' needs a GPU
folder = compressed(tmp_path)   # compressed-tensors' own compressor
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.models import tiny

WIDE = {"hidden_size": 128, "moe_intermediate_size": 256, "intermediate_size": 128}
Tensors = dict[str, Tensor]


def plain(folder: Path, name: str, **overrides: Any) -> Tensors:
    """An unquantised checkpoint in one file, and its tensors."""
    options = {"dtype": "bfloat16", "shards": 1, "tokenizer": True, **overrides}
    tiny(name, folder, **options)
    return load_file(folder / "model.safetensors")


def save(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> Path:
    """Write the tensors, and the quantization_config into config.json."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = settings
    path.write_text(json.dumps(config))
    return folder


def fp8(
    folder: Path,
    name: str = "qwen3_moe",
    block: tuple[int, int] = (128, 128),
    scales: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Every linear layer in 8-bit floats with block scales, but those that blocks do not divide."""
    tensors = plain(folder, name, **{**WIDE, **overrides})
    settings = {"weight_block_size": list(block), "scale_fmt": "float"}
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**settings)))
    quantised: Tensors = {}
    for key, tensor in tensors.items():
        dense = key.startswith(("model.embed", "lm_head")) or ".gate.weight" in key
        quantised |= {key: tensor} if dense else quantise._quantize_one(key, tensor)
    quantised = {k: v.to(scales) if "scale_inv" in k else v for k, v in quantised.items()}
    return save(
        folder, quantised, {"quant_method": "fp8", "activation_scheme": "dynamic", **settings}
    )


def mxfp4(folder: Path, **overrides: Any) -> Path:
    """gpt-oss with its experts' weights in blocks of 32 e2m1 values under a power of two."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **overrides}
    tensors = plain(folder, "gpt_oss", **sizes)
    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    packer = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    for name in [n for n in tensors if n.endswith("_proj") and "experts" in n]:
        w = tensors.pop(name).transpose(1, 2)  # [experts, outputs, inputs]
        # OCP's rule for the scale: the largest of a block gets e2m1's largest exponent, 2.
        largest = w.unflatten(2, (-1, 32)).float().abs().amax(-1)
        scale = torch.exp2(largest.log2().floor() - 2)
        state = packer.compress(
            {"weight": w.flatten(0, 1), "weight_scale": scale.flatten(0, 1)}, scheme
        )
        tensors[f"{name}_blocks"] = state["weight_packed"].view(*scale.shape, 16)
        tensors[f"{name}_scales"] = state["weight_scale"].view(scale.shape)
    return save(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": []})


def compressed(
    folder: Path,
    name: str = "qwen3_moe",
    group: int = 32,
    bits: int = 4,
    wider: dict[str, int] | None = None,
    **overrides: Any,
) -> Path:
    """Experts and attention packed to integers of 4 bits, as llm-compressor writes them.

    wider: matrices whose name has the key in it are in groups of another size
    """
    tensors = plain(folder, name, **{**WIDE, **overrides})
    arguments = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
    }
    sizes = {**(wider or {}), "": group}
    groups = {
        part: {
            "targets": [f"re:.*{part}.*"] if part else ["Linear"],
            "weights": {**arguments, "group_size": size},
        }
        for part, size in sizes.items()
    }
    packer = BaseCompressor.get_value_from_registry("pack-quantized")
    quantised: Tensors = {}
    for key, w in tensors.items():
        if not key.endswith("_proj.weight"):
            quantised[key] = w
            continue
        part = next(part for part in sizes if part in key)
        scheme = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**groups[part]["weights"])
        )
        scale = w.unflatten(1, (-1, sizes[part])).float().abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        state = packer.compress({"weight": w, "weight_scale": scale.to(w.dtype)}, scheme)
        quantised |= {key.removesuffix("weight") + part: tensor for part, tensor in state.items()}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    return save(folder, quantised, settings)
