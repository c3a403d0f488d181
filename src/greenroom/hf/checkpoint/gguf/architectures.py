"""The table of MoE architectures in GGUF files.

llama.cpp names an architecture in the metadata of a file. Several of transformers' architectures
may share one of these names.
"""

from __future__ import annotations

from transformers.models.auto.configuration_auto import model_type_to_module_name

# Folder in transformers/models -> GGUF's name of the architecture.
SERVED = {
    "afmoe": "afmoe",
    "bailing_hybrid": "bailingmoe3",
    "cohere2_moe": "cohere2moe",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "deepseek_v4": "deepseek4",
    "dots1": "dots1",
    "dots3_note": "dots3note",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "gemma4": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "glm4v_moe": "glm4moe",
    "glm5_next": "glm5-next",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "granitemoe_swa": "granite_swa",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "laguna": "laguna",
    "lfm2_moe": "lfm2moe",
    "llama4": "llama4",
    "mellum": "mellum",
    "mimo_v2_flash": "mimo2",
    "minimax_m2": "minimax-m2",
    "minimax_m3_vl": "minimax-m3",
    "mistral4": "mistral4",
    "mixtral": "llama",
    "nemotron_h": "nemotron_h_moe",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_omni_moe": "qwen3vlmoe",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen4_exp": "qwen4exp",
    "solar_open": "glm4moe",
    "step3p7": "step35",
}

# Architectures with a GGUF format that Greenroom does not read, with the reason.
_TOWER = "since they need the vision tower, which is in another GGUF file"
UNREAD = {
    "deepseek_ocr2": _TOWER,
    "minimax": "since they lack the decays of linear attention that transformers' model loads",
    "unlimited_ocr": _TOWER,
}

NO_FORMAT = "no GGUF format exists"


def gguf_name(folder: str) -> str:
    """Return GGUF's name of an architecture, or the reason why it is not read.

    `folder` is the architecture's folder in transformers/models.
    """
    return SERVED.get(folder) or UNREAD.get(folder, NO_FORMAT)


def fits_architecture(model_type: str, architecture: str) -> bool:
    """Return whether a config's model type is one that a GGUF architecture stands for."""
    return SERVED.get(model_type_to_module_name(model_type)) == architecture


def served_names() -> list[str]:
    """Return GGUF's names of all architectures that are read from GGUF files, sorted."""
    return sorted({*SERVED.values()})
