"""Find llama.cpp's name of each model parameter, by gguf's own table of tensor names.

The table maps names of original checkpoints. transformers renames and fuses some of them when it
loads a checkpoint, so its own weight conversions are reversed first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)

from greenroom.hf.adapters import weight_transforms

# Differences between names of checkpoints and those that gguf's table lists, in this order.
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?language_model\.(model\.)?", "model."),
        (r"\.dt_bias$", ".dt_proj.bias"),
        (r"\.mlp\.e_score_", ".mlp.gate.e_score_"),
        (r"_correction_bias$", "_correction.bias"),
        (r"\.expert_bias$", ".expert_bias.bias"),
    )
)
# Names that gguf's table lacks: a parameter's name inside its layer -> GGUF's name. All of these
# rules are applied, in this order. Each name on the way is possible.
EXCEPTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^router\.scale$", "ffn_gate_inp.scale"),  # Gemma 4
        (r"^router\.per_expert_scale$", "ffn_down_exps.scale"),
        (r"^(attn|ffn)_hc\.(fn|base|scale)$", r"hc_\1_\2.weight"),  # DeepSeek-V4
        (r"^mlp\.gate\.tid2eid$", "ffn_gate_tid2eid.weight"),
        (r"^self_attn\.sinks$", "attn_sinks.weight"),
        (r"^self_attn\.q_a_norm\.", "attn_q_a_norm."),
        (r"^self_attn\.kv_proj\.", "attn_kv."),
        (r"^self_attn\.kv_norm\.", "attn_kv_a_norm."),
        (r"^self_attn\.o_([ab])_proj\.", r"attn_output_\1."),
        (r"^self_attn\.compressor\.indexer\.q_b_proj\.", "indexer.attn_q_b."),
        (r"^self_attn\.compressor\.indexer\.scorer\.weights_proj\.", "indexer.proj."),
        (r"^self_attn\.compressor\.indexer\.", "indexer_compressor_"),
        (r"^self_attn\.compressor\.", "attn_compressor_"),
        (r"_compressor_position_bias$", "_compressor_ape.weight"),
        (r"_compressor_(kv|gate)_proj\.", r"_compressor_\1."),
        (r"_compressor_kv_norm\.", "_compressor_norm."),
        (r"^self_attn\.forget_gate\.A_log$", "ssm_a"),  # Ling 3
        (r"^self_attn\.forget_gate\.dt_bias$", "ssm_dt.bias"),
        (r"^self_attn\.forget_gate\.f_proj\.", "ssm_f_a."),
        (r"^self_attn\.g(ate)?_proj\.", "attn_gate."),
        (r"^attn_gate\.", "ssm_g_a."),  # in layers with linear attention
        (r"^block_sparse_moe\.router\.", "ffn_gate_inp."),  # Granite with a sliding window
        (r"^shared_mlp\.input_linear\.", "ffn_up_shexp."),
        (r"^self_attn\.k_rope_only_layernorm\.", "attn_k_norm."),  # dots3
        (r"^(attn|mlp)_hyper_connection\.", r"hc_\1_"),  # Qwen4
        (r"^hc_mlp_", "hc_ffn_"),
        (r"^(hc_\w+_)hc_norm\.", r"\1norm."),
        (r"^(hc_\w+_)input_mix_weight_", r"\1"),
        (r"^(hc_\w+_)block_inject_weight\.", r"\1inject."),
        (r"^ple\.(\w+?)(_proj)?\.weight$", r"ple_\1.weight"),
        (r"^self_attn\.indexer\.([qk])_layernorm\.", r"indexer.\1_norm."),
        (r"^self_attn\.indexer\.([qk]_(proj|norm))\.", r"indexer.\1."),  # MiniMax-M3
        (r"^self_attn\.indexer\.w(q_b|k)\.", r"indexer.attn_\1."),  # GLM-5.3
        (r"^self_attn\.indexer\.weights_proj\.", "indexer.proj."),
        (r"^self_attn\.indexer\.index_kpool_compress_(\w+)$", r"indexer_compressor_\1.weight"),
    )
)
# The same for names that GGUF has without a layer: a pattern in a parameter's full name.
MODEL_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.hc_head\.hc_(fn|base|scale)$", r"output_hc_\1.weight"),
        (r"\.hyper_connection_mixer\.hc_norm\.weight$", "output_hc_norm.weight"),
        (r"\.hyper_connection_mixer\.input_mix_weight_(\w+)\.weight$", r"output_hc_\1.weight"),
        (r"\.ple_embedding\.ngram_embedding\.weight$", "per_layer_token_embd.weight"),
        (r"\.ple_embedding\.layer_multipliers$", "qwen4exp.ple.layer_multipliers"),
        (r"\.ple_embedding\.ngram_heads_(\w+)$", r"qwen4exp.ple.head_\1"),
    )
)
# Architectures that gguf does not know -> one with the same names.
SAME_NAMES = {
    "bailingmoe3": "kimi-linear",
    "cohere2moe": "dots1",
    "deepseek32": "glm-dsa",
    "deepseek4": "glm-dsa",
    "dots3note": "glm-dsa",
    "glm5-next": "kimi-linear",
    "granite_swa": "granitemoe",
    "hy_v3": "dots1",
    "hy_v4": "glm-dsa",
    "laguna": "dots1",
    "mellum": "qwen3moe",
    "minimax-m3": "dots1",
    "qwen4exp": "qwen35moe",
}
LAYER = re.compile(r"\.(\d+)\.")
SUFFIXES = ("", ".weight", ".bias")


class GgufNames:
    """llama.cpp's names for the parameters of one model, from gguf's table of tensor names.

    `architecture` is GGUF's name, which gguf or SAME_NAMES must have. The table is made once.
    """

    def __init__(self, model: PreTrainedModel, architecture: str, layers: int) -> None:
        name = SAME_NAMES.get(architecture, architecture)
        import gguf  # imported here: other formats must not need it

        number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
        # gguf changes a dict of this class for some architectures, so each table has its own copy.
        blocks = {"block_mappings_cfg": dict(gguf.TensorNameMap.block_mappings_cfg)}
        self._table = type("Table", (gguf.TensorNameMap,), blocks)(number, layers)
        reverse = _reverse_transforms(model)
        self._renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._converters = [each for each in reverse if isinstance(each, WeightConverter)]

    def names_of(self, parameter: str) -> Iterator[str]:
        """Yield possible names of a parameter in a GGUF file, the most likely first."""
        renamed, _ = apply_converters(parameter, self._converters)
        for name in (apply_renamings(renamed, self._renamings), parameter):
            for pattern, replacement in RULES:
                name = pattern.sub(replacement, name)
            for suffix in SUFFIXES:
                if name.endswith(suffix) and (
                    stem := self._table.get_name(name.removesuffix(suffix))
                ):
                    yield from (stem + suffix, f"{stem}.weight", stem)
        yield from _exceptions(parameter)


def _exceptions(parameter: str) -> Iterator[str]:
    """Yield possible names in a GGUF file of a parameter that gguf's table lacks."""
    for pattern, replacement in MODEL_NAMES:
        if match := pattern.search(parameter):
            yield match.expand(replacement)
    if (layer := layer_of(parameter)) is None:
        return
    inner = parameter.partition(f".{layer}.")[2]
    for pattern, replacement in EXCEPTIONS:
        changed = pattern.sub(replacement, inner)
        if changed != inner:
            yield f"blk.{layer}.{(inner := changed)}"


def layer_of(name: str) -> int | None:
    """Return the number of a parameter's layer: the first number in its name, if there is one."""
    match = LAYER.search(name)
    return int(match[1]) if match else None


def _reverse_transforms(model: PreTrainedModel) -> list[WeightRenaming | WeightConverter]:
    """Return transformers' weight transforms of a model from its parameters to a checkpoint."""
    reverse = []
    for transform in reversed(weight_transforms(model)):
        if isinstance(transform, PrefixChange):  # a prefix that some checkpoints have
            continue
        try:
            reverse.append(transform.reverse_transform())
        except NotImplementedError:  # of routed experts, which are found by their modules
            continue
    return reverse
