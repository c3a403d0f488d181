"""A model's forward for one token whose layers run in one parallel region.

Around its layers a model of transformers looks up the token's embedding and the rotary tables,
makes a mask, calls each layer, and normalises the last output. Python takes longer for that than
for everything else of a resident token. So a pass of the model's own forward is compared with what
is expected of it: if its parts, computed again by themselves, have the same bits, the next tokens
are computed from these parts. A model that does something else keeps its forward, and so does a
call with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers

Forward = Callable[..., Any]
# Arguments with a meaning here. Others must be None, or flags of outputs that are not asked for.
ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
)
# Arguments of a layer that are made for every token.
CHANGING = frozenset({"past_key_values", "position_embeddings", "position_ids"})
# Settings of a configuration that make a layer look at some of the tokens only.
WINDOWS = ("sliding_window", "attention_chunk_size")


class _Verdict(NamedTuple):
    """What a pass of the model's own forward has shown.

    output:   the class of its result
    keywords: the arguments that it gave its layers; None for those that change from token to token
    config:   the configuration's settings at the time
    """

    output: Callable[..., Any]
    keywords: dict[str, Any]
    config: dict[str, Any]


class _Token(NamedTuple):
    """One token that a model's forward was called for."""

    ids: Tensor
    position: Tensor
    cache: Any
    has_mask: bool


class DecodePass:
    """A forward that computes one token from the parts of a model."""

    def __init__(self, model: nn.Module, parts: _Parts, fused: FusedLayers) -> None:
        """Make the forward of `model`, whose decoder layers are those of `fused`."""
        self._model, self._parts, self._fused = model, parts, fused
        self._original: Forward = model.forward
        self._check = parts.check(model)
        # By whether the call has a mask of padding. None: the model keeps its forward.
        self._verdicts: dict[bool, _Verdict | None] = {}

    @staticmethod
    def of(model: nn.Module, fused: FusedLayers) -> DecodePass | None:
        """Make the forward of a model that consists of layers and the parts around them.

        Return None for a model with other parts.
        """
        parts = _Parts.of(model, fused)
        return None if parts is None else DecodePass(model, parts, fused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, as its own forward does."""
        if torch.compiler.is_compiling() or args or not self._fused.is_ready:
            return self._original(*args, **kwargs)
        token = _read_call(kwargs)
        if token is None:
            return self._original(**kwargs)
        if token.has_mask not in self._verdicts:
            return self._compare(token, kwargs)
        verdict = self._verdicts[token.has_mask]
        if (
            verdict is None
            or vars(self._model.config) != verdict.config
            or not self._check.passes()
        ):
            return self._original(**kwargs)
        return self._compute(token, verdict, kwargs)

    def _compute(self, token: _Token, verdict: _Verdict, kwargs: dict[str, Any]) -> Any:
        """Compute one token from the model's parts."""
        parts = self._parts
        x = parts.embedding.forward(token.ids)
        keywords = verdict.keywords | {
            "position_embeddings": parts.rotary.forward(x, token.position),
            "past_key_values": token.cache,
        }
        if "position_ids" in keywords:
            keywords["position_ids"] = token.position
        outputs = self._fused.compute(x, keywords)
        if outputs is None:
            return self._original(**kwargs)
        hidden = outputs[-1]
        for layer in parts.layers[len(outputs) :]:
            hidden = layer(hidden, **keywords)
        hidden = parts.norm.forward(hidden)
        return verdict.output(last_hidden_state=hidden, past_key_values=token.cache)

    def _compare(self, token: _Token, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, and compare it with the parts computed by themselves."""
        out, last = self._fused.watch(partial(self._original, **kwargs))
        if last is not None:
            self._verdicts[token.has_mask] = self._judge(token, out, *last)
        return out

    def _judge(
        self, token: _Token, out: Any, x: Tensor, keywords: dict[str, Any], hidden: Tensor
    ) -> _Verdict | None:
        """Return the verdict on a pass with these inputs and output of its layers, or None."""
        parts, config = self._parts, self._model.config
        cos, sin = keywords["position_embeddings"]
        pairs = (
            (x, parts.embedding.forward(token.ids)),
            *zip((cos, sin), parts.rotary.forward(x, token.position), strict=True),
            (getattr(out, "last_hidden_state", None), parts.norm.forward(hidden)),
        )
        same = all(a is not None and torch.equal(a, b) for a, b in pairs)
        if (
            not same
            or keywords["past_key_values"] is not token.cache
            or getattr(out, "past_key_values", None) is not token.cache
            or not isinstance(out, Mapping)
            or set(out) != {"last_hidden_state", "past_key_values"}
            or not sees_all_tokens(config)
        ):
            return None
        constant = {name: None if name in CHANGING else each for name, each in keywords.items()}
        if any(isinstance(each, Tensor) for each in constant.values()):
            return None  # it may change from token to token
        return _Verdict(type(out), constant, dict(vars(config)))


class _Parts(NamedTuple):
    """The parts of a model whose forward is known: all of its submodules."""

    embedding: nn.Module
    rotary: nn.Module
    norm: nn.Module
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]  # of the first three, and of the list of layers

    @staticmethod
    def of(model: nn.Module, fused: FusedLayers) -> _Parts | None:
        """Find the parts of a model; None if there are others, or one without compiled code."""
        kinds: dict[str, tuple[str, nn.Module]] = {}
        for name, part in model._modules.items():
            if part is not None and (kind := kind_of(part)) not in kinds:
                kinds[kind] = name, part
            else:
                return None
        if kinds.keys() != {"embedding", "rotary", "norm", "layers"} or "config" not in vars(model):
            return None
        names, modules = zip(
            *(kinds[kind] for kind in ("embedding", "rotary", "norm", "layers")), strict=True
        )
        layers = tuple(modules[3].children())
        if layers != fused.modules or "forward" not in vars(modules[1]):
            return None
        return _Parts(modules[0], modules[1], modules[2], layers, names)

    def check(self, model: nn.Module) -> ModuleCheck:
        """Return a check that the model has these parts, with their forwards and without hooks."""
        check = ModuleCheck()
        modules = model._modules[self.names[3]]
        assert modules is not None
        for name, part in zip(self.names, (*self[:3], modules), strict=True):
            check.require_same(model._modules, name, part)
        for name, layer in zip(modules._modules, self.layers, strict=True):
            check.require_same(modules._modules, name, layer)
        for part in chain(self[:3], self.layers):
            check.require_no_hooks(part)
            check.require_same(vars(part), "forward", vars(part).get("forward"))
        return check


def kind_of(part: nn.Module) -> str:
    """Return what a submodule of a model is, by its structure; an empty text if unknown."""
    if isinstance(part, nn.ModuleList):
        return "layers"
    if isinstance(part, nn.Embedding):
        return "embedding"
    if "inv_freq" in part._buffers:
        return "rotary"
    return "norm" if part._parameters.keys() == {"weight"} and not part._modules else ""


def sees_all_tokens(config: Any) -> bool:
    """Tell whether a configuration has layers that attend to all tokens only."""
    kinds = getattr(config, "layer_types", None) or ()
    windows = (getattr(config, name, None) for name in WINDOWS)
    return {*kinds} <= {"full_attention"} and not any(windows)


def _read_call(kwargs: dict[str, Any]) -> _Token | None:
    """Read the arguments of a model's forward; None if they are not those of one plain token."""
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if ids is None or cache is None or ids.shape != (1, 1) or kwargs.get("use_cache") is False:
        return None
    for name, value in kwargs.items():
        unasked = value is False and name.startswith("output_")
        if name not in ARGUMENTS and value is not None and not unasked:
            return None
    tokens, mask = cache.get_seq_length(), kwargs.get("attention_mask")
    if mask is not None and (mask.shape != (1, tokens + 1) or not mask.all()):
        return None
    position = kwargs.get("position_ids")
    if position is None:
        position = torch.tensor([[tokens]])
    elif position.shape != (1, 1) or position.item() != tokens:
        return None
    return _Token(ids, position, cache, mask is not None)
