"""Attention of single tokens on a GPU, by the kernel that CUDA graphs need.

Its bits do not depend on the KV cache's room. It takes the place of torch's attention in passes of
one token through decoders that can be one graph (`graph_pass`), with and without a graph. So the
bits are the same in both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from greenroom.runtime.cuda.token_graph import NoGraph, TokenGraph, active_graph
from greenroom.runtime.kernels.triton.token_attention import (
    attend_in_place,
    attend_to_all,
    is_supported,
)

SDPA = "sdpa"
MARK = "_greenroom_token_attention"  # attribute of modules whose attention is replaced
_original = ALL_ATTENTION_FUNCTIONS[SDPA]


class GraphCache(DynamicCache):
    """KV cache that layers see in a graph, which stores nothing: the attention does.

    layer:  the layer of the last update
    states: its keys and values
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = -1
        self.states: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer, self.states = layer_idx, (key_states, value_states)
        return self.states


def replace_attention(decoder: nn.Module) -> None:
    """Let our kernel compute single tokens' attention in the submodules of a decoder."""
    ALL_ATTENTION_FUNCTIONS.register(SDPA, _attention)
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__[MARK] = True


def restore_attention(decoder: nn.Module) -> None:
    """Undo `replace_attention`."""
    for module in decoder.modules():
        module.__dict__.pop(MARK, None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute the attention of a module, as transformers' function for torch's attention does."""
    if MARK in module.__dict__ and query.shape[2] == 1:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if (graph := active_graph()) is not None:
            return _in_graph(graph, query, key, value, scale, kwargs), None
        if attention_mask is None and _is_plain(kwargs) and is_supported(query, key, value):
            return attend_to_all(query, key, value, scale), None
    result: tuple[Tensor, Any] = _original(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return result


def _in_graph(
    graph: TokenGraph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    cache: GraphCache = graph.cache
    # Some models store other tensors than they attend to (DeepSeek-V3: latent ones).
    stored = cache.states is not None and key is cache.states[0] and value is cache.states[1]
    if not stored or graph.shapes[cache.layer] != (key.shape[1], key.shape[3], value.shape[3]):
        raise NoGraph("attention to other tensors than those that are stored")
    if not _is_plain(options) or not is_supported(query, key.contiguous(), value.contiguous()):
        raise NoGraph("attention with options, types or sizes that the kernel lacks")
    fields = graph.fields[cache.layer]
    return attend_in_place(query, key, value, fields, graph.before, scale, graph.room)


def _is_plain(options: dict[str, Any]) -> bool:
    """Tell whether attention has no option that the kernel lacks; a window is in the mask."""
    others = ("softcap", "position_bias", "s_aux", "cache")
    return not options.get("dropout") and all(options.get(name) is None for name in others)
