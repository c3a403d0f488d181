"""Faster dense layers around the experts, for the one token of a decode step.

torch multiplies a matrix with one bfloat16 vector at half the memory's speed, and spends more
time in starting the six operations of a norm than in computing them. Eligible submodules get a
forward of their own, as an attribute of the instance, that calls a compiled body for up to
`FEW` tokens and the original forward for anything else. `detach` takes all of them out again.

Modules whose matrix is as the checkpoint stores it have no other forward than this: a few tokens
are multiplied with what is stored, for many some rows at a time are expanded. `detach` gives them
their weights, expanded.

float32 modules stay torch's: another order of summation would be the whole distance to eager.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels import layers
from greenroom.runtime.kernels.attention import (
    OneToken,
    Reserve,
    Style,
    attention_forward,
    fits,
    norms_of,
)
from greenroom.runtime.kernels.chain import Chain, Experts
from greenroom.runtime.kernels.decoder import Key, OneLayer, Onto
from greenroom.runtime.kernels.openmp import body
from greenroom.runtime.kernels.patterns import sublayers
from greenroom.runtime.kernels.rotary import Rotary
from greenroom.runtime.kernels.stored import (
    EXPANDED,
    Record,
    Stored,
    put_back,
    room,
    scratch,
    stored_of,
)

FEW = 16  # tokens
_SERIAL = 1 << 17  # weights below which a second thread is not worth its start
_DTYPES = {torch.bfloat16, torch.float16}
_ROUTERS = {"gate", "router"}  # compiled with their layer or not at all (router.py)

Forward = Callable[..., Tensor]
Ahead = Callable[[Sequence[Key]], "Experts | None"]


class Accelerated:
    """The submodules that were given a forward: `counts` by kind; `detach()` restores them."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        self._model, self._modules = model, list[nn.Module]()

    def add(self, kind: str, module: nn.Module, forward: Forward) -> None:
        module.forward = forward  # shadows the class's
        self._modules.append(module)
        self.counts[kind] = self.counts.get(kind, 0) + 1

    @property
    def compiled(self) -> set[nn.Module]:
        """The modules whose weights compiled code may read by address."""
        return {part for module in self._modules for part in module.modules()}

    def detach(self) -> None:
        """Take every forward out again; a second call does nothing."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()
        self.counts.clear()
        put_back(self._model)


def accelerate(
    model: nn.Module,
    reserve: Reserve = lambda cache, layer: None,
    onto: Onto | None = None,
    rounded: bool = False,
    *,
    ahead: Ahead | None = None,
    take_back: Callable[[Any, int], None] = lambda cache, layer: None,
) -> Accelerated:
    """Give the eligible submodules of a model on the CPU a compiled forward for few tokens.

    `reserve` makes room in a KV cache for one token, where it can; `onto` computes a layer's
    experts and adds them to what it is given; `rounded` says whether stored weights are rounded to
    the model's type. `ahead` are the experts of layers that follow one another, of which each token
    then goes through all in one region; `take_back` takes such a token out of a cache again.
    """
    done, tried, attentions = Accelerated(model), dict[Any, bool](), dict[nn.Module, OneToken]()
    for module in model.modules():
        if fits(module) and _free(module):
            styles = {_head_norm(module, part) for part in norms_of(module)}
            if len(styles) <= 1 and None not in styles:
                style = styles.pop() if styles else None
                attentions[module] = one = OneToken(module, style, reserve, tried, rounded)
                done.add("attention", module, attention_forward(one))
    layers_of: dict[nn.Module, OneLayer] = {}
    for layer in filter(_free, list(model.modules())):
        if (around := _around(layer, attentions, onto)) is not None:
            layers_of[layer] = around
            done.add("layer", layer, around.forward)
            if around.choice is not None:
                done.add("router", around.choice.module, around.choice.forward)
    dtypes = {one.dtype for one in attentions.values()}
    for module in filter(_free, list(model.modules())):
        if dtypes and (rotary := Rotary.of(module, dtypes)) is not None:
            done.add("rotary", module, rotary.forward)
    if ahead is not None:
        _join(model, layers_of, ahead, take_back)
    for module in model.modules():
        if (stored := stored_of(module)) is not None:
            embedding = isinstance(module, nn.Embedding)
            forward = embedding_forward if embedding else stored_forward
            done.add(
                "embedding" if embedding else "linear", module, forward(module, stored, rounded)
            )
    for module in _candidates(model):
        if type(module) is nn.Linear:
            done.add("linear", module, linear_forward(module))
        elif (style := norm_style(module)) is not None:
            done.add("norm", module, norm_forward(module, *style))
    return done


def _around(
    layer: nn.Module, attentions: dict[nn.Module, OneToken], onto: Onto | None
) -> OneLayer | None:
    """A decoder layer of the common kind around one of these attentions."""
    inside = [(name, attentions[m]) for name, m in layer._modules.items() if m in attentions]
    if len(inside) != 1:
        return None
    name, one = inside[0]
    styles = {
        other: style
        for other, part in layer._modules.items()
        if part is not None and (style := _norm_of(part, one)) is not None
    }
    names = sublayers(layer, name, styles, one.hidden, one.dtype)
    if names is None:
        return None
    return OneLayer(layer, one, names, (styles[names[0]], styles[names[1]]), onto)


def _join(
    model: nn.Module,
    layers_of: dict[nn.Module, OneLayer],
    ahead: Ahead,
    take_back: Callable[[Any, int], None],
) -> None:
    """Make chains of the layers of a kind that stand side by side in a list."""

    def kind(layer: nn.Module) -> Any:
        return layers_of[layer].kind if layer in layers_of else None

    for each in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for alike, run in groupby(each, kind):
            links = [layers_of[layer] for layer in run] if alike is not None else []
            if len(links) > 1:
                keys = [key for link in links if (key := link.takes_part()) is not None]
                chain = Chain(links, partial(ahead, keys), take_back)
                for number, link in enumerate(links):
                    link.chain = chain, number


def _norm_of(part: nn.Module, one: OneToken) -> Style | None:
    """The style of a part that is an RMSNorm of an attention's input."""
    weight = part._parameters.get("weight")
    if weight is None or weight.shape != (one.hidden,) or weight.dtype is not one.dtype:
        return None
    return norm_style(part) if weight.is_contiguous() and _unheard(part) else None


def _head_norm(attention: nn.Module, norm: nn.Module) -> tuple[int, float] | None:
    """The style of a norm of each head, or None: of all heads together, or another kind."""
    weight = norm._parameters.get("weight")
    of_a_head = weight is not None and weight.numel() == attention.head_dim
    return norm_style(norm) if of_a_head else None


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    """Plain modules with a weight on the CPU, outside experts and routers, and not hooked."""
    outside: list[str] = []
    for name, module in model.named_modules():
        path = name.split(".")
        if hasattr(module, "num_experts") and hasattr(module, "_apply_gate"):
            outside.append(name + ".")
        if _ROUTERS & set(path) or name.startswith(tuple(outside)):
            continue
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype not in _DTYPES or weight.device.type != "cpu":
            continue
        if _free(module) and weight.is_contiguous():
            yield module


def _free(module: nn.Module) -> bool:
    """Has it no forward of its own, and does nobody listen to it?"""
    return "forward" not in module.__dict__ and _unheard(module)


def _unheard(module: nn.Module) -> bool:
    return not module._forward_hooks and not module._forward_pre_hooks


def linear_forward(module: nn.Linear) -> Forward:
    """nn.Linear's forward, compiled for up to FEW rows of its own type."""
    weight, bias = module.weight, module.bias
    parameters, dtype, (N, K) = module._parameters, weight.dtype, weight.shape
    enter, wide, limit = body(layers.gemv, dtype, False), N * K > _SERIAL, FEW * K
    empty, grad, original = torch.empty, torch.is_grad_enabled, type(module).forward

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        size = input.numel()
        if (
            size > limit
            or size == 0
            or input.dtype is not dtype
            or parameters["weight"] is not weight
            or not input.is_contiguous()
            or grad()
            or input.shape[-1] != K
        ):
            return original(module, input)
        out = empty((*input.shape[:-1], N), dtype=dtype)
        floats, sums = (input.float(), empty(size // K, N)) if size > K else (None, None)
        words = array(
            "q",
            (
                *(0, weight.data_ptr(), N, K, input.data_ptr(), out.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), size // K, 0, 0, 0),
                *(
                    0 if floats is None else floats.data_ptr(),
                    0 if sums is None else sums.data_ptr(),
                ),
            ),
        )
        enter(words.buffer_info()[0], wide)
        return out

    return forward


def stored_forward(module: nn.Module, stored: Stored, rounded: bool) -> Forward:
    """nn.Linear's forward with a stored matrix."""
    bias, parameters, original = (
        module._parameters["bias"],
        module._parameters,
        type(module).forward,
    )
    record, enter = Record(stored, rounded), body(layers.gemv, stored.dtype, True)
    (N, K), dtype, grad = stored.shape, stored.dtype, torch.is_grad_enabled
    stride, wide = 4 * FEW * K + room(K), N * K > _SERIAL

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        if parameters["weight"] is not None:  # it was given one
            return original(module, input)
        if input.is_meta:  # shapes only
            return input.new_empty(*input.shape[:-1], N)
        size = input.numel()
        if (
            size > FEW * K
            or size == 0
            or input.dtype is not dtype
            or not input.is_contiguous()
            or grad()
            or input.shape[-1] != K
        ):
            return many(input, stored, bias)
        out = torch.empty((*input.shape[:-1], N), dtype=dtype)
        words = array(
            "q",
            (
                *(0, record.address, N, K, input.data_ptr(), out.data_ptr()),
                *(0 if bias is None else bias.data_ptr(), size // K, 0, scratch(stride), stride),
                *(0, 0),
            ),
        )
        enter(words.buffer_info()[0], wide)
        return out

    return forward


def many(x: Tensor, stored: Stored, bias: Tensor | None) -> Tensor:
    """torch's own product with some rows of a stored matrix after others, each time expanded."""
    rows, columns = stored.shape
    step = max(1, EXPANDED // (columns * stored.dtype.itemsize))
    parts = []
    for first in range(0, rows, step):
        w = stored.rows(first, min(step, rows - first))
        parts.append(linear(x, w, None if bias is None else bias[first : first + step]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def embedding_forward(module: nn.Module, stored: Stored, rounded: bool) -> Forward:
    """nn.Embedding's forward with a stored matrix; its rows are always rounded."""
    parameters, original, columns = module._parameters, type(module).forward, stored.shape[1]
    del rounded

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        if parameters["weight"] is not None:
            return original(module, input)
        if input.is_meta:
            return torch.empty(*input.shape, columns, dtype=stored.dtype, device="meta")
        return stored.look_up(input)

    return forward


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


NORMS: dict[int, Callable[[Tensor, Tensor, float], Tensor]] = {
    layers.ROUND_THEN_SCALE: lambda x, w, eps: w * _normed(x, eps).to(x.dtype),
    layers.SCALE_IN_FLOAT: lambda x, w, eps: (w.float() * _normed(x, eps)).to(x.dtype),
    layers.ONE_PLUS_IN_FLOAT: lambda x, w, eps: ((1 + w.float()) * _normed(x, eps)).to(x.dtype),
}


@torch.no_grad()
def norm_style(module: nn.Module) -> tuple[int, float] | None:
    """(how it applies its weight, epsilon) if a module is an RMSNorm by what it does, else None."""
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or module._modules:
        return None
    epsilons = {v for v in vars(module).values() if type(v) is float and 0 < v < 0.01}
    random = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-3, 1.0, 50.0])[:, None]
    x = (torch.randn(3, weight.numel(), generator=random) * scales).to(weight.dtype)
    try:
        wanted = module(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None  # it takes something other than one tensor
    if not isinstance(wanted, Tensor) or wanted.dtype != x.dtype or wanted.shape != x.shape:
        return None
    for eps in epsilons:
        matching = [
            s for s, formula in NORMS.items() if torch.equal(formula(x, weight, eps), wanted)
        ]
        if matching:
            return matching[0], eps
    return None


def norm_forward(module: nn.Module, style: int, eps: float) -> Forward:
    """An RMSNorm's forward, compiled for few rows of its own type."""
    parameters, original = module._parameters, type(module).forward
    weight: Tensor = parameters["weight"]  # type: ignore[assignment]
    dtype, n = weight.dtype, weight.numel()
    enter, limit = body(layers.rms_norm, dtype), 1 << 14
    epsilon = struct.unpack("<i", struct.pack("<f", eps))[0]
    empty_like, grad = torch.empty_like, torch.is_grad_enabled

    @outside_graphs
    def forward(x: Tensor) -> Tensor:
        size = x.numel()
        if (
            size > limit
            or x.dtype is not dtype
            or parameters["weight"] is not weight
            or not x.is_contiguous()
            or grad()
            or x.shape[-1] != n
        ):
            return original(module, x)
        out = empty_like(x)
        words = array(
            "q",
            (
                *(0, x.data_ptr(), out.data_ptr(), weight.data_ptr()),
                *(size // n, n, epsilon, style),
            ),
        )
        enter(words.buffer_info()[0], False)
        return out

    return forward
