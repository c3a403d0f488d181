"""Compiled dense layers around the experts, for the one token of a decode step.

torch multiplies a matrix with one bfloat16 vector at half the memory's speed, and takes longer to
start the six operations of a norm than to compute them. Eligible submodules get a compiled forward
as an attribute of the instance. It computes up to 16 tokens, and calls the original forward for
anything else. `detach` removes these forwards.

A module whose matrix stays encoded as in the checkpoint has only the compiled forward. It
multiplies a few tokens with the encoded matrix; for more tokens it decodes some rows at a time.
`detach` gives such a module its decoded weight.

float32 modules stay torch's: another order of summation would be the only difference from eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.attention import (
    OneTokenAttention,
    Reserve,
    Style,
    attention_forward,
    head_norms,
    is_common_attention,
)
from greenroom.runtime.kernels.dense.blocks.mlp import LINEAR as MLP_PARTS
from greenroom.runtime.kernels.dense.blocks.mlp import CompiledMlp
from greenroom.runtime.kernels.dense.decoder import AddExperts, FusedDecoderLayer
from greenroom.runtime.kernels.dense.norms import norm_style
from greenroom.runtime.kernels.dense.patterns import find_sublayers
from greenroom.runtime.kernels.dense.rotary import RotaryTables
from greenroom.runtime.kernels.dense.stored import (
    EXPANDED,
    JoinedMatrix,
    MatrixRecord,
    StoredMatrix,
    encoded_matrices,
    product_scratch,
    restore_weights,
    stored_matrix,
    thread_scratch,
    weight_matrix,
)
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library
from greenroom.runtime.kernels.panel_order import KERNELS

FEW = 16  # tokens
_SERIAL = 1 << 17  # so many weights are not worth starting a second thread
_DTYPES = {torch.bfloat16, torch.float16}
_ROUTERS = {"gate", "router"}  # compiled with their layer only (router.py)

Forward = Callable[..., Tensor]


class Accelerated:
    """The submodules of a model that have a compiled forward; `detach()` restores them.

    counts: number of submodules by kind: attention, layer, router, mlp, rotary, embedding, linear,
            norm
    layers: the decoder layers whose forward is fused, by module
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        self.layers: dict[nn.Module, FusedDecoderLayer] = {}
        self._model, self._modules, self._passes = model, list[nn.Module](), list[nn.Module]()

    def add(self, kind: str, module: nn.Module, forward: Forward) -> None:
        """Give a module a compiled forward, and count the module under its kind."""
        module.forward = forward  # shadows the class's
        self._modules.append(module)
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def add_pass(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a model a forward that calls compiled code of its submodules."""
        model.forward = forward
        self._passes.append(model)

    @property
    def compiled(self) -> set[nn.Module]:
        """Return the modules whose weights compiled code may read by address."""
        return {part for module in self._modules for part in module.modules()}

    def detach(self) -> None:
        """Remove all compiled forwards from a model; a second call does nothing."""
        for module in (*self._modules, *self._passes):
            module.__dict__.pop("forward", None)
        self._modules.clear()
        self._passes.clear()
        self.counts.clear()
        restore_weights(self._model)


def accelerate(
    model: nn.Module,
    reserve: Reserve = lambda cache, layer: None,
    add_experts: AddExperts | None = None,
    kernels: str = "native",
) -> Accelerated:
    """Give a model's dense submodules on the CPU compiled forwards for few tokens.

    reserve: reserves space for one token in a layer's KV cache, or returns None if it cannot
    add_experts: computes a layer's experts and adds them to the residual
    kernels: products of encoded matrices: native, precise or rounded (matrix.py)
    """
    if kernels in KERNELS:
        for matrix in encoded_matrices(model):
            matrix.arrange()
    accelerated, tried, attentions = (
        Accelerated(model),
        dict[Any, bool](),
        dict[nn.Module, OneTokenAttention](),
    )
    for module in model.modules():
        if is_common_attention(module) and _is_unmodified(module):
            styles = {_head_norm_style(module, part) for part in head_norms(module)}
            if len(styles) <= 1 and None not in styles:
                style = styles.pop() if styles else None
                attentions[module] = attention = OneTokenAttention(
                    module, style, reserve, tried, kernels
                )
                accelerated.add("attention", module, attention_forward(attention))
    for layer in filter(_is_unmodified, list(model.modules())):
        if (around := _fuse_layer(layer, attentions, add_experts, kernels)) is not None:
            accelerated.layers[layer] = around
            accelerated.add("layer", layer, around.forward)
            if around.router is not None:
                accelerated.add("router", around.router.module, around.router.forward)
    for module in filter(_is_unmodified, list(model.modules())):
        if (mlp := _compile_mlp(module, kernels)) is not None:
            accelerated.add("mlp", module, mlp.forward)
    dtypes = {attention.dtype for attention in attentions.values()}
    for module in filter(_is_unmodified, list(model.modules())):
        if dtypes and (rotary := RotaryTables.of(module, dtypes)) is not None:
            accelerated.add("rotary", module, rotary.forward)
    for module in model.modules():
        if (stored := stored_matrix(module)) is not None:
            if isinstance(stored, JoinedMatrix):
                accelerated.add("linear", module, joined_forward(module, stored, kernels))
            elif isinstance(module, nn.Embedding):
                accelerated.add("embedding", module, embedding_forward(module, stored))
            else:
                accelerated.add("linear", module, linear_forward(module, stored, kernels))
    for module in _eligible_modules(model):
        if type(module) is nn.Linear:
            accelerated.add("linear", module, linear_forward(module))
        elif (style := norm_style(module)) is not None:
            accelerated.add("norm", module, norm_forward(module, *style))
    return accelerated


def _fuse_layer(
    layer: nn.Module,
    attentions: dict[nn.Module, OneTokenAttention],
    add_experts: AddExperts | None,
    kernels: str,
) -> FusedDecoderLayer | None:
    """Make a fused decoder layer around one of these attentions, if the layer fits."""
    inside = [(name, attentions[m]) for name, m in layer._modules.items() if m in attentions]
    if len(inside) != 1:
        return None
    name, attention = inside[0]
    styles = {
        other: style
        for other, part in layer._modules.items()
        if part is not None and (style := _input_norm_style(part, attention)) is not None
    }
    names = find_sublayers(layer, name, styles, attention.hidden, attention.dtype)
    if names is None:
        return None
    return FusedDecoderLayer(
        layer, attention, names, (styles[names[0]], styles[names[1]]), add_experts, kernels
    )


def _compile_mlp(module: nn.Module, kernels: str) -> CompiledMlp | None:
    """Compile a gated MLP, if the module is one."""
    part = module._modules.get(MLP_PARTS[-1])
    if type(part) is not nn.Linear:
        return None
    return CompiledMlp.of(module, weight_matrix(part).dtype, kernels)


def _input_norm_style(part: nn.Module, attention: OneTokenAttention) -> Style | None:
    """Return the style of an RMSNorm of the attention's input, or None for other modules."""
    weight = part._parameters.get("weight")
    if weight is None or weight.shape != (attention.hidden,) or weight.dtype is not attention.dtype:
        return None
    return norm_style(part) if weight.is_contiguous() and _has_no_hooks(part) else None


def _head_norm_style(attention: nn.Module, norm: nn.Module) -> tuple[int, float] | None:
    """Return the style of an RMSNorm of single heads, or None for other norms."""
    weight = norm._parameters.get("weight")
    of_a_head = weight is not None and weight.numel() == attention.head_dim
    return norm_style(norm) if of_a_head else None


def _eligible_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield unhooked modules with a weight on the CPU, outside experts and routers."""
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
        if _is_unmodified(module) and weight.is_contiguous():
            yield module


def _is_unmodified(module: nn.Module) -> bool:
    """Has a module neither a forward in its instance nor hooks?"""
    return "forward" not in module.__dict__ and _has_no_hooks(module)


def _has_no_hooks(module: nn.Module) -> bool:
    return not module._forward_hooks and not module._forward_pre_hooks


def linear_forward(
    module: nn.Module, stored: StoredMatrix | None = None, kernels: str = "native"
) -> Forward:
    """Make a compiled forward of nn.Linear for up to 16 input rows.

    stored: a matrix in its checkpoint's encoding, to use instead of the module's weight
    kernels: products with `stored`: native, precise or rounded (matrix.py)

    The compiled code computes contiguous inputs in the dtype of the weight. The original forward,
    or torch's product with the decoded matrix, computes other inputs.
    """
    parameters, original = module._parameters, type(module).forward
    weight, bias = parameters["weight"], parameters["bias"]
    grad, empty = torch.is_grad_enabled, torch.empty
    matrix: Any = weight if stored is None else stored
    (N, K), dtype = matrix.shape, matrix.dtype
    record = MatrixRecord(matrix, kernels)
    enter, wide, limit = kernel_entry("linear", dtype), N * K > _SERIAL, FEW * K
    stride = 0 if stored is None else 4 * limit + product_scratch(K)
    structure = library().structure("LinearCall")
    template = structure(matrix=record.address, outputs=N, inputs=K, stride=stride)
    copied = structure.from_buffer_copy

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
            return original(module, input) if stored is None else multiply_many(input, stored, bias)
        out, call = empty((*input.shape[:-1], N), dtype=dtype), copied(template)
        call.x, call.out, call.rows = input.data_ptr(), out.data_ptr(), size // K
        if bias is not None:
            call.bias = bias.data_ptr()
        if stride:
            call.scratch = thread_scratch(stride)
        else:
            record.point_to(matrix)
            if size > K and dtype is not torch.bfloat16:  # bfloat16 stays as it is
                floats, sums = input.float(), empty(size // K, N)
                call.wide, call.sums = floats.data_ptr(), sums.data_ptr()
        enter(addressof(call), wide)
        return out

    return forward


def joined_forward(module: nn.Module, joined: JoinedMatrix, kernels: str) -> Forward:
    """Make a compiled forward of nn.Linear without bias, whose weight is in parts.

    kernels: products with encoded parts: native, precise or rounded (matrix.py)
    """
    parameters, original, outputs = module._parameters, type(module).forward, joined.shape[0]
    forwards = []
    for part in joined.parts:
        linear = nn.Linear(1, 1, bias=False, device="meta")
        if isinstance(part, Tensor):
            linear.weight = nn.Parameter(part, requires_grad=False)
            forwards.append(linear_forward(linear))
        else:
            linear.register_parameter("weight", None)
            forwards.append(linear_forward(linear, part, kernels))

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        if parameters["weight"] is not None:
            return original(module, input)
        out = input.new_empty(*input.shape[:-1], outputs)
        if not input.is_meta:
            for multiply, places in zip(forwards, joined.places, strict=True):
                out.index_copy_(-1, places, multiply(input))
        return out

    return forward


def multiply_many(x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    """Multiply many rows x [..., inputs] with an encoded matrix, decoded part by part.

    torch multiplies x with each decoded part, of at most 32 MiB.
    """
    rows, columns = stored.shape
    step = max(1, EXPANDED // (columns * stored.dtype.itemsize))
    parts = []
    for first in range(0, rows, step):
        w = stored.rows(first, min(step, rows - first))
        parts.append(linear(x, w, None if bias is None else bias[first : first + step]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def embedding_forward(module: nn.Module, stored: StoredMatrix) -> Forward:
    """Make a forward of nn.Embedding that reads a matrix in its checkpoint encoding.

    The rows are rounded to the model's type.
    """
    parameters, original, columns = module._parameters, type(module).forward, stored.shape[1]

    @outside_graphs
    def forward(input: Tensor) -> Tensor:
        if parameters["weight"] is not None:
            return original(module, input)
        if input.is_meta:
            return torch.empty(*input.shape, columns, dtype=stored.dtype, device="meta")
        return stored.look_up(input)

    return forward


def norm_forward(module: nn.Module, style: int, eps: float) -> Forward:
    """Make a compiled RMSNorm forward for few input rows in the weight's dtype."""
    parameters, original = module._parameters, type(module).forward
    weight: Tensor = parameters["weight"]  # type: ignore[assignment]
    dtype, n = weight.dtype, weight.numel()
    enter, limit = kernel_entry("add_and_norm", dtype), max(1 << 14, FEW * n)
    structure = library().structure("NormCall")
    template, copied = structure(columns=n, eps=eps, style=style), structure.from_buffer_copy
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
        out, call = empty_like(x), copied(template)
        call.x, call.out, call.more = x.data_ptr(), out.data_ptr(), size // n - 1
        call.weight = weight.data_ptr()
        enter(addressof(call), False)
        return out

    return forward
