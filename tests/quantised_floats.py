"""Tiny checkpoints in floats of eight or four bits, in the layouts of several tools.

folder = floats(tmp_path, "modelopt", "nvfp4")
folder = floats(tmp_path, "compressed-tensors", "fp8 blocks")
folder = fp8_with_fp4_experts(tmp_path)

All codes and scales are made by compressed-tensors' own compressors. Where another tool has other
names or types, they are changed as its exporter writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised import WIDE, Tensors, plain, save

LARGEST = {8: 448.0, 4: 6.0}
# Form -> its compressor, and its settings of weights in compressed-tensors.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 matrix": ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8 rows": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    ),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
}
METHODS = {
    "compressed-tensors": tuple(FORMS),
    "modelopt": ("fp8 matrix", "fp8 rows", "fp8 blocks", "nvfp4"),
    "quark": ("fp8 matrix", "fp8 rows", "mxfp4"),
    "fbgemm_fp8": ("fp8 rows",),
    "mxfp4": ("mxfp4", "mxfp4 blocks"),
    "mxfp8": ("mxfp8",),
}
CASES = [(method, form) for method, forms in METHODS.items() for form in forms]


def scales(w: Tensor, form: str) -> Tensors:
    """The scales that a tool would choose, by the largest weight of each group."""
    settings = FORMS[form][1]
    largest, w = LARGEST[settings["num_bits"]], w.float().abs()
    match settings["strategy"]:
        case "tensor":
            return {"weight_scale": w.amax().view(1) / largest}
        case "channel":
            return {"weight_scale": w.amax(1, keepdim=True) / largest}
        case "block":
            rows, columns = (max(1, n // 128) for n in w.shape)
            blocks = w.view(rows, len(w) // rows, columns, -1)
            return {"weight_scale": blocks.amax((1, 3)) / largest}
        case "group":  # OCP's rule: the largest of a group gets the code's largest exponent
            power = w.unflatten(1, (-1, 32)).amax(-1).log2().floor()
            return {"weight_scale": torch.exp2(power - {4: 2, 8: 8}[settings["num_bits"]])}
    ratio = (448 * 6) / w.amax().view(1)
    scale = (w.unflatten(1, (-1, 16)).amax(-1) / largest * ratio).to(torch.float8_e4m3fn)
    return {"weight_scale": scale.float(), "weight_global_scale": ratio}


def compress(w: Tensor, form: str) -> Tensors:
    """Quantise a matrix with compressed-tensors."""
    packer = BaseCompressor.get_value_from_registry(FORMS[form][0])
    weights = QuantizationArgs(type="float", symmetric=True, **FORMS[form][1])
    state = {"weight": w.clone(), **scales(w, form)}
    result: Tensors = packer.compress(
        state, QuantizationScheme(targets=["Linear"], weights=weights)
    )
    return result


def decompress(state: Tensors, form: str) -> Tensor:
    """Dequantise a matrix with compressed-tensors."""
    packer = BaseCompressor.get_value_from_registry(FORMS[form][0])
    weights = QuantizationArgs(type="float", symmetric=True, **FORMS[form][1])
    if weights.strategy == "block":  # older releases take one column of scales for scales of rows
        expanded: Tensor = dequantize(state["weight"], state["weight_scale"], args=weights)
        return expanded
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    weight: Tensor = packer.decompress(dict(state), scheme)["weight"]
    return weight


def renamed(state: Tensors, method: str, form: str) -> Tensors:
    """A matrix's tensors by the names, types and shapes that a tool gives them."""
    if method == "compressed-tensors":
        if form == "nvfp4":
            state["input_global_scale"] = torch.ones(1)
        return state
    state = {name.replace("weight_packed", "weight"): tensor for name, tensor in state.items()}
    if method == "modelopt":
        if form == "fp8 matrix":
            state["weight_scale"] = state["weight_scale"][0]
        if form == "fp8 blocks":
            state["weight_scale"] = state["weight_scale"][:, None, :, None]
        if form == "fp8 rows":
            state["weight_scale"] = state["weight_scale"][:, 0]
        if form == "nvfp4":
            state["weight_scale_2"] = 1 / state.pop("weight_global_scale")[0]
        state["input_scale"] = torch.tensor(1.0)
    if form == "mxfp4 blocks":
        state["weight_blocks"] = state.pop("weight").unflatten(1, (-1, 16))
        state["weight_scales"] = state.pop("weight_scale")
    if method == "mxfp8":
        state["weight_scale_inv"] = state.pop("weight_scale")
    if method == "quark" and form == "fp8 matrix":
        state["weight_scale"] = state["weight_scale"][0]
    return state


def settings_of(method: str, form: str) -> dict[str, Any]:
    if method == "mxfp8":
        return {"quant_method": method, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    if method != "compressed-tensors":
        return {"quant_method": method, "quant_algo": form.upper()}
    weights = {"type": "float", "symmetric": True, **FORMS[form][1]}
    return {
        "quant_method": method,
        "format": FORMS[form][0],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def floats(folder: Path, method: str, form: str, name: str = "qwen3_moe", **overrides: Any) -> Path:
    """Experts and attention in floats, in the layout of a tool."""
    sizes = {**WIDE, "head_dim": 32, **overrides}
    quantised: Tensors = {}
    for key, w in plain(folder, name, **sizes).items():
        if not key.endswith("_proj.weight"):
            quantised[key] = w
            continue
        state = renamed(compress(w, form.replace("mxfp4 blocks", "mxfp4")), method, form)
        quantised |= {key.removesuffix("weight") + part: tensor for part, tensor in state.items()}
    return save(folder, quantised, settings_of(method, form))


def modelopt_for_llama(folder: Path, vocabulary: int = 64) -> Path:
    """ModelOpt's NVFP4 of a tiny Qwen3-MoE; tests/data/gguf/modelopt has it as llama.cpp's GGUF."""
    narrow = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    sizes = {**narrow, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    floats(
        folder, "modelopt", "nvfp4", vocab_size=vocabulary, tokenizer=False, mlp_only_layers=[],
        norm_topk_prob=True, **sizes,
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    tensors |= {key: tensor / 7 for key, tensor in tensors.items() if key.endswith("input_scale")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def fp8_with_fp4_experts(folder: Path, name: str = "deepseek_v4", **overrides: Any) -> Path:
    """DeepSeek-V4's mixture: experts in MXFP4, the other matrices in FP8 blocks of 128 x 128."""
    quantised: Tensors = {}
    for key, w in plain(folder, name, **{**WIDE, **overrides}).items():
        stem = key.removesuffix("weight")
        if ".experts." in key:
            state = compress(w, "mxfp4")
            quantised[key] = state["weight_packed"].view(torch.int8)
            quantised[f"{stem}scale"] = state["weight_scale"].view(torch.float8_e8m0fnu)
        elif (".attn.w" in key or ".shared_experts." in key) and all(n % 128 == 0 for n in w.shape):
            state = compress(w, "fp8 blocks")
            quantised[key] = state["weight"]
            quantised[f"{stem}scale"] = state["weight_scale"].to(torch.float8_e8m0fnu)
        else:
            quantised[key] = w
    settings = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return save(
        folder, quantised, {"quant_method": "fp8", "activation_scheme": "dynamic", **settings}
    )
