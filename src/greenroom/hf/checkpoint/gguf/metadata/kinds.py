"""Choice of transformers' architecture where GGUF has one name for several."""

from __future__ import annotations

from greenroom.hf.checkpoint.gguf.metadata.reader import Metadata

CORRECTION = r"blk\.\d+\.exp_probs_b\.bias"
GLM_VOCABULARY = 154880


def deepseek2(metadata: Metadata) -> str:
    """Choose between DeepSeek V2, V3 and GLM-4.7-Flash.

    V2 has a router with softmax, the others with a sigmoid and a correction of scores.
    """
    if metadata.get("attention.temperature_scale") is not None:
        raise metadata.refused("attention.temperature_scale is not of a DeepSeek model")
    function = metadata.get("expert_gating_func", 0)
    is_corrected = metadata.has(CORRECTION)
    if function != 0 and (function, is_corrected) not in ((1, False), (2, True)):
        raise metadata.refused(
            f"expert_gating_func {function} {'with' if is_corrected else 'without'} a correction of"
            " scores is neither of DeepSeek V2 nor of V3"
        )
    if not is_corrected:
        return "deepseek_v2"
    is_glm = metadata.tensors["token_embd.weight"].shape[0] == GLM_VOCABULARY
    return "glm4_moe_lite" if is_glm else "deepseek_v3"


def glm4moe(metadata: Metadata) -> str:
    """Choose between GLM-4.5 and GLM-4.5V, whose positions have sections.

    Solar Open computes as GLM-4.5.
    """
    is_vision = metadata.has_key("rope.dimension_sections")
    return "glm4v_moe" if is_vision else "glm4_moe"


def granitemoe(metadata: Metadata) -> str:
    """Choose between Granite MoE with and without shared experts."""
    shared = metadata.get("expert_shared_feed_forward_length", 0)
    return "granitemoeshared" if shared else "granitemoe"
