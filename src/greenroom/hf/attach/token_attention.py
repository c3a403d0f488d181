"""Attention of single tokens on a GPU, by the kernel that CUDA graphs need.

Its bits do not depend on the KV cache's room. It takes the place of the model's attention in passes
of one token through decoders that can be one graph (`graph_pass`), with and without a graph. So the
bits are the same in both.

Models of latent attention (DeepSeek-V2) store two vectors of each token, and expand them to keys
and values of each head for every pass. For a single token their kernel attends to what is stored:
one product puts the expansion of keys into the query, another one that of values behind attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from greenroom.hf.kv.batch import ATTENTION
from greenroom.hf.model.graph_decoder import EAGER, SDPA
from greenroom.runtime.cuda.token_graph import NoGraph, TokenGraph, active_graph
from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.module_check import GLOBAL_HOOKS
from greenroom.runtime.kernels.triton.token_attention import (
    attend_in_place,
    attend_to_all,
    is_supported,
)

EAGER_FUNCTION = "eager_attention_forward"  # every modelling file has one
MARK = "_greenroom_token_attention"  # attribute of modules whose attention is replaced
OPTIONS = ("softcap", "position_bias", "cache")  # that the kernel lacks
TRIAL, NEAR = 64, 0.05  # tokens of the comparison with a module's own attention, its tolerance

Attend = Callable[..., tuple[Tensor, Any]]


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
    ALL_ATTENTION_FUNCTIONS.register(SDPA, _replacing(ALL_ATTENTION_FUNCTIONS[SDPA]))
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            file = sys.modules[type(module).__module__]
            if (eager := getattr(file, EAGER_FUNCTION, None)) is not None:
                setattr(file, EAGER_FUNCTION, _replacing(eager))
            module.__dict__[MARK] = TokenAttention(module)


def restore_attention(decoder: nn.Module) -> None:
    """Undo `replace_attention`."""
    for module in decoder.modules():
        if (attention := module.__dict__.pop(MARK, None)) is not None:
            attention.detach()


def compile_attention(decoder: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the attention of a decoder's single tokens now, by a trial computation."""
    config: Any = decoder.config
    modules = [module.__dict__.get(MARK) for module in decoder.modules()]
    marks = [attention for attention in modules if attention is not None]
    if marks and hasattr(config, "num_attention_heads"):
        max(marks, key=lambda each: each.is_latent).compile(config, dtype, device)


class _Call(NamedTuple):
    """A call of an attention function of transformers, `function`, for one token."""

    function: Attend
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        scale: float | None = self.options.get("scaling")
        return self.query.shape[3] ** -0.5 if scale is None else scale

    @property
    def sinks(self) -> Tensor | None:
        return self.options.get("s_aux")

    def is_plain(self) -> bool:
        """Tell whether attention has no mask and no option that the kernel lacks."""
        mask, options = self.mask, self.options
        lacks = OPTIONS if self.function.__name__ == EAGER_FUNCTION else (*OPTIONS, "s_aux")
        others = any(options.get(name) is not None for name in lacks)
        shared = mask is None or (mask.is_floating_point() and mask.shape[:3] == (1, 1, 1))
        return shared and not options.get("dropout") and not others


def _replacing(original: Attend) -> Attend:
    """Return an attention function of transformers that leaves single tokens to `MARK`."""
    if hasattr(original, MARK):
        return original

    @wraps(original)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        token: TokenAttention | None = module.__dict__.get(MARK)
        if token is not None:
            if query.shape[2] == 1 and not args:
                call = _Call(original, query, key, value, attention_mask, kwargs)
                if (out := token.compute(call)) is not None:
                    return out, None
            key, value = token.expand(key, value)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attend, MARK, True)
    return attend


class TokenAttention:
    """A module's attention of single tokens.

    It is compared once with the module's own function, on a few tokens: a function that computes
    something else keeps its place.

    is_latent: whether the module stores two vectors of a token
    """

    _is_near: bool | None = None  # to the module's own function; None: not compared yet

    def __init__(self, module: nn.Module) -> None:
        """Take the place of a module's attention; `detach` gives it back."""
        self._module: Any = module
        self._own_expand: Any = getattr(module, "expand_kv", None)
        names = "qk_nope_head_dim", "v_head_dim"
        self._widths: list[int] = [self._module.__dict__.get(name, 0) for name in names]
        self.is_latent = hasattr(module, "expand_kv") and all(self._widths)
        if self.is_latent:
            module.__dict__["expand_kv"] = self._keep_latent

    def detach(self) -> None:
        """Give the module its own attention back."""
        self._module.__dict__.pop("expand_kv", None)

    def _keep_latent(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Leave what is stored as it is, for an attention function that is one of `_replacing`."""
        if self._module.config._attn_implementation in (*ATTENTION, *ATTENTION.values()):
            return first, second
        keys, values = self._own_expand(first, second)
        return keys, values

    def expand(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of each head, from what the module's attention function gets."""
        return self._own_expand(key, value) if self.is_latent else (key, value)

    @outside_graphs
    def compute(self, call: _Call) -> Tensor | None:
        """Return a token's attention [1, 1, heads, width]; None if the kernel cannot compute it.

        Raises NoGraph in place of None in a graph, where the mask is not read.
        """
        if (graph := active_graph()) is not None:
            query = self._in_graph(graph, call._replace(mask=None))
            cache: GraphCache = graph.cache
            fields, room = graph.fields[cache.layer], graph.room_of(cache.layer)
            out = attend_in_place(
                query, call.key, call.value, fields, graph.before, call.scale, room, call.sinks,
                self.is_latent,
            )  # fmt: skip
            return self._expand_out(out)
        if not call.is_plain() or not self._can_project(call.query):
            return None
        query = self._project(call.query)
        if not is_supported(query, call.key, call.value, self.is_latent):
            return None
        return self._attend(query, call) if self._agrees(query, call) else None

    def _attend(self, query: Tensor, call: _Call) -> Tensor:
        return self._expand_out(
            attend_to_all(
                query, call.key, call.value, call.scale, call.mask, call.sinks, self.is_latent
            )
        )

    def _in_graph(self, graph: TokenGraph, call: _Call) -> Tensor:
        """Return the query, as it attends to what is stored; NoGraph if a graph cannot have it."""
        cache: GraphCache = graph.cache
        key, value = call.key, call.value
        shape, window = graph.shapes[cache.layer]
        stored = cache.states is not None and key is cache.states[0] and value is cache.states[1]
        if not stored or shape != (key.shape[1], key.shape[3], value.shape[3]):
            raise NoGraph("attention to other tensors than those that are stored")
        if window != call.options.get("sliding_window"):
            raise NoGraph("attention to other tokens than those that are stored")
        if not self._is_near or not call.is_plain() or not self._can_project(call.query):
            raise NoGraph("attention that the kernel does not compute")
        query = self._project(call.query)
        if not is_supported(query, key.contiguous(), value.contiguous(), self.is_latent):
            raise NoGraph("attention of types or sizes that the kernel lacks")
        return query

    def _agrees(self, query: Tensor, call: _Call) -> bool:
        """Compare the kernel, once, with the module's own function for the last few tokens."""
        if self._is_near is None:
            key, value = (x[:, :, -TRIAL:] for x in (call.key, call.value))
            mask = None if call.mask is None else call.mask[..., -TRIAL:]
            ours = self._attend(query, call._replace(key=key, value=value, mask=mask))
            tensors = [x.float() for x in (call.query, *self.expand(key, value))]
            bias = None if mask is None else mask.float()
            theirs = call.function(self._module, *tensors, bias, **call.options)[0]
            self._is_near = bool((ours - theirs).norm() <= NEAR * theirs.norm())
        return self._is_near

    def _can_project(self, query: Tensor) -> bool:
        """Tell whether the module's expansion is one product, and nobody observes it."""
        if not self.is_latent:
            return True
        linear: Any = getattr(self._module, "kv_b_proj", None)
        if type(linear) is not nn.Linear or linear.bias is not None or "forward" in vars(linear):
            return False
        hooks = linear._forward_hooks, linear._forward_pre_hooks, *GLOBAL_HOOKS
        fits = linear.out_features == query.shape[1] * sum(self._widths)
        return fits and linear.weight.dtype is query.dtype and not any(hooks)

    def _weights(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the weights that expand keys and values: [heads, width, stored width] each."""
        weight: Tensor = self._module.kv_b_proj.weight
        keys, values = weight.view(heads, -1, weight.shape[1]).split(self._widths, 1)
        return keys, values

    def _project(self, query: Tensor) -> Tensor:
        """Put the expansion of keys into a query [1, heads, 1, width]."""
        if not self.is_latent:
            return query
        first, second = query[0].tensor_split([self._widths[0]], 2)
        return torch.cat((first @ self._weights(query.shape[1])[0], second), 2)[None]

    def _expand_out(self, out: Tensor) -> Tensor:
        """Expand the values in attention's result [1, 1, heads, width]."""
        if not self.is_latent:
            return out
        heads = out.shape[2]
        return (out.view(heads, 1, -1) @ self._weights(heads)[1].mT).view(1, 1, heads, -1)

    def compile(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel for a model of this configuration, by a trial computation."""
        heads, latent = config.num_attention_heads, self.is_latent
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        widths = (width, width)
        if latent:
            key_heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
        key, value = (torch.zeros(1, key_heads, 1, n, dtype=dtype, device=device) for n in widths)
        query = key.new_zeros(1, heads, 1, sum(widths) if latent else width)
        mask = key.new_zeros(1, 1, 1, 1) if config._attn_implementation == EAGER else None
        if is_supported(query, key, value, latent):
            sinks = getattr(self._module, "sinks", None)
            attend_to_all(query, key, value, 1.0, mask, sinks, latent)
