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

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.codegen.entries import layers
from greenroom.runtime.kernels.dense.attention import (
    OneTokenAttention,
    Reserve,
    Style,
    attention_forward,
    fits,
    norms_of,
)
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer, Onto
from greenroom.runtime.kernels.dense.patterns import sublayers
from greenroom.runtime.kernels.dense.rotary import Rotary
from greenroom.runtime.kernels.dense.stored import (
    EXPANDED,
    MatrixRecord,
    StoredMatrix,
    restore_weights,
    room,
    scratch,
    stored_matrix,
)
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import bits

FEW = 16  # tokens
_SERIAL = 1 << 17  # weights below which a second thread is not worth its start
_DTYPES = {torch.bfloat16, torch.float16}
_ROUTERS = {"gate", "router"}  # compiled with their layer or not at all (router.py)

Forward = Callable[..., Tensor]


class Accelerated:
    """The submodules that were given a forward: `counts` by kind, `layers` those of the common
    kind; `detach()` restores them."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        self.layers: dict[nn.Module, FusedDecoderLayer] = {}
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
        restore_weights(self._model)


def accelerate(
    model: nn.Module,
    reserve: Reserve = lambda cache, layer: None,
    onto: Onto | None = None,
    rounded: bool = False,
) -> Accelerated:
    """Give the eligible submodules of a model on the CPU a compiled forward for few tokens.

    `reserve` makes room in a KV cache for one token, where it can; `onto` computes a layer's
    experts and adds them to what it is given; `rounded` says whether stored weights are rounded to
    the model's type.
    """
    done, tried, attentions = (
        Accelerated(model),
        dict[Any, bool](),
        dict[nn.Module, OneTokenAttention](),
    )
    for module in model.modules():
        if fits(module) and _free(module):
            styles = {_head_norm(module, part) for part in norms_of(module)}
            if len(styles) <= 1 and None not in styles:
                style = styles.pop() if styles else None
                attentions[module] = one = OneTokenAttention(module, style, reserve, tried, rounded)
                done.add("attention", module, attention_forward(one))
    for layer in filter(_free, list(model.modules())):
        if (around := _around(layer, attentions, onto)) is not None:
            done.layers[layer] = around
            done.add("layer", layer, around.forward)
            if around.choice is not None:
                done.add("router", around.choice.module, around.choice.forward)
    dtypes = {one.dtype for one in attentions.values()}
    for module in filter(_free, list(model.modules())):
        if dtypes and (rotary := Rotary.of(module, dtypes)) is not None:
            done.add("rotary", module, rotary.forward)
    for module in model.modules():
        if (stored := stored_matrix(module)) is not None:
            if isinstance(module, nn.Embedding):
                done.add("embedding", module, embedding_forward(module, stored))
            else:
                done.add("linear", module, linear_forward(module, stored, rounded))
    for module in _candidates(model):
        if type(module) is nn.Linear:
            done.add("linear", module, linear_forward(module))
        elif (style := norm_style(module)) is not None:
            done.add("norm", module, norm_forward(module, *style))
    return done


def _around(
    layer: nn.Module, attentions: dict[nn.Module, OneTokenAttention], onto: Onto | None
) -> FusedDecoderLayer | None:
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
    return FusedDecoderLayer(layer, one, names, (styles[names[0]], styles[names[1]]), onto)


def _norm_of(part: nn.Module, one: OneTokenAttention) -> Style | None:
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


def linear_forward(
    module: nn.Module, stored: StoredMatrix | None = None, rounded: bool = False
) -> Forward:
    """nn.Linear's forward, compiled for up to FEW rows of its own type; perhaps of a stored
    matrix, `rounded` or not."""
    parameters, original = module._parameters, type(module).forward
    weight, bias = parameters["weight"], parameters["bias"]
    grad, empty = torch.is_grad_enabled, torch.empty
    matrix: Any = weight if stored is None else stored
    (N, K), dtype = matrix.shape, matrix.dtype
    record = None if stored is None else MatrixRecord(stored, rounded)
    enter, wide, limit = (
        kernel_entry(layers.gemv, dtype, record is not None),
        N * K > _SERIAL,
        FEW * K,
    )
    stride = 0 if record is None else 4 * limit + room(K)

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        if parameters["weight"] is not weight:
            return original(module, input)
        if stored is not None and input.is_meta:  # shapes only
            return input.new_empty(*input.shape[:-1], N)
        size = input.numel()
        if (
            size > limit
            or size == 0
            or input.dtype is not dtype
            or not input.is_contiguous()
            or grad()
            or input.shape[-1] != K
        ):
            return original(module, input) if stored is None else many(input, stored, bias)
        out, floats, sums = empty((*input.shape[:-1], N), dtype=dtype), None, None
        if record is None and size > K:
            floats, sums = input.float(), empty(size // K, N)
        words = array(
            "q",
            (
                *(0, matrix.data_ptr() if record is None else record.address, N, K),
                *(input.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()),
                *(size // K, 0, scratch(stride) if stride else 0, stride),
                *(0 if each is None else each.data_ptr() for each in (floats, sums)),
            ),
        )
        enter(words.buffer_info()[0], wide)
        return out

    return forward


def many(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    """torch's own product with some rows of a stored matrix after others, each time expanded."""
    rows, columns = stored.shape
    step = max(1, EXPANDED // (columns * stored.dtype.itemsize))
    parts = []
    for first in range(0, rows, step):
        w = stored.rows(first, min(step, rows - first))
        parts.append(linear(x, w, None if bias is None else bias[first : first + step]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def embedding_forward(module: nn.Module, stored: StoredMatrix) -> Forward:
    """nn.Embedding's forward with a stored matrix; its rows are always rounded."""
    parameters, original, columns = module._parameters, type(module).forward, stored.shape[1]

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
    enter, limit = kernel_entry(layers.add_and_norm, dtype), 1 << 14
    epsilon = bits(eps)
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
                *(0, x.data_ptr(), 0, 0, out.data_ptr(), weight.data_ptr()),
                *(n, epsilon, style, size // n - 1),
            ),
        )
        enter(words.buffer_info()[0], False)
        return out

    return forward
