"""Find the decoder whose pass of one token can be one CUDA graph.

Plans use it too, where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from greenroom.runtime.kernels.resident.decode_pass import kind_of

PARTS = {"embedding", "rotary", "norm", "layers"}  # a decoder that consists of others is left alone
SDPA, EAGER = ATTENTION = ("sdpa", "eager")  # functions that `token_attention` replaces
LAYERS = {"full_attention", "sliding_attention"}  # kinds of layers
# Rotary embeddings whose tables do not depend on the longest position so far.
ROTARY = {"default", "linear", "llama3", "yarn", "proportional"}


def graph_decoder(model: nn.Module, modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the decoder whose pass of one token can be a graph; None if there is none.

    modules: the model's experts modules
    """
    for decoder in model.modules():
        kinds = [kind_of(part) for part in decoder._modules.values() if part is not None]
        fits = sorted(kinds) == sorted(PARTS) and set(modules) <= set(decoder.modules())
        if fits and _can_be_graph(decoder.config):
            return decoder
    return None


def _can_be_graph(config: Any) -> bool:
    """Tell whether a decoder's configuration has only what a graph can compute."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if config._attn_implementation not in ATTENTION or kinds - LAYERS:
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    types = {rope.get("rope_type", "default")}
    is_chunked = getattr(config, "attention_chunk_size", None)
    nested = any(isinstance(value, dict) for value in rope.values())
    return types <= ROTARY and not is_chunked and not nested
