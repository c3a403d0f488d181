"""A compiled gated MLP for a few tokens: down(silu(gate(x)) * up(x)).

Dense layers have one as their block, and many MoE blocks have one beside their experts, as the
shared expert of all tokens. Its kernel calls are stages of the region that computes its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.activation import SILU, Activation
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.patterns import is_gated_mlp
from greenroom.runtime.kernels.dense.stored import (
    MatrixRecord,
    all_readable,
    any_stored,
    product_scratch,
    thread_scratch,
    weight_matrix,
)
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.call_block import CallBlock
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

LINEAR = ("gate_proj", "up_proj", "down_proj")
FEW = 16  # tokens


class MlpCalls(NamedTuple):
    """Kernel calls of an MLP for some tokens, and their result.

    stages: the kernel calls; each has the number of tokens in its field `rows`
    out:    the result [tokens, hidden]
    memory: what lies between the projections; it must stay alive as long as the calls
    """

    stages: tuple[sequence.Stage, ...]
    out: Tensor
    memory: Tensor


class CompiledMlp:
    """The compiled forward of one gated MLP, for up to 16 tokens.

    `CompiledMlp.of` makes it for modules of the supported kind.
    """

    def __init__(self, module: nn.Module, kernels: str) -> None:
        self.module, self._original = module, type(module).forward
        parts: list[Any] = [module._modules[name] for name in LINEAR]
        weights = [weight_matrix(part) for part in parts]
        (self.inner, self.hidden), self.dtype = weights[0].shape, weights[0].dtype
        self.check = ModuleCheck()
        self.check.require_no_hooks(module)
        for name, part in zip(LINEAR, parts, strict=True):
            self.check.require_same(module._modules, name, part)
            self.check.require_weight(part)
            self.check.require_no_hooks(part)
        self._is_stored = any_stored(weights)
        self._records = [MatrixRecord(each, kernels) for each in weights]
        structure = library().structure
        linear, activate = structure("LinearCall"), structure("ActivateCall")
        self._linear = kernel_entry("linear", self.dtype)
        self._activate = kernel_entry("activate", self.dtype)
        self._products = [
            linear(
                matrix=record.address,
                outputs=weight.shape[0],
                inputs=weight.shape[1],
                bias=None if part.bias is None else part.bias.data_ptr(),
            )
            for record, weight, part in zip(self._records, weights, parts, strict=True)
        ]
        self._activation = activate(columns=self.inner)
        formula = Activation(SILU)
        for name in ("code", "limit", "alpha"):
            setattr(self._activation.activation, name, getattr(formula, name))

    @staticmethod
    def of(module: nn.Module, dtype: torch.dtype, kernels: str = "native") -> CompiledMlp | None:
        """Compile a gated MLP for a few tokens; return None for other modules.

        kernels: products with encoded matrices: native, precise or rounded (matrix.py)
        """
        parts = [module._modules.get(name) for name in LINEAR]
        if module._parameters or module._buffers:
            return None
        if not all(type(part) is nn.Linear for part in parts):
            return None
        gate, up, down = weights = [weight_matrix(part) for part in parts if part is not None]
        readable = (
            dtype in (torch.bfloat16, torch.float16)
            and all(each.is_contiguous() and each.dtype is dtype for each in weights)
            and all(each.device.type == "cpu" for each in weights)
            and all_readable(weights)
        )
        shapes = gate.shape == up.shape == down.shape[::-1]
        if not readable or not shapes or not is_gated_mlp(module, LINEAR, gate.shape, dtype):
            return None
        return CompiledMlp(module, kernels)

    def stride(self, tokens: int) -> int:
        """Return how many bytes of scratch memory the kernel calls need per thread."""
        inputs = max(self.hidden, self.inner)
        return 4 * tokens * inputs + product_scratch(inputs) if self._is_stored else 0

    def calls(self, x: int, tokens: int) -> MlpCalls:
        """Make the kernel calls for hidden states [tokens, hidden] at the address x."""
        memory = torch.empty(2, tokens, self.inner, dtype=self.dtype)
        out = torch.empty(tokens, self.hidden, dtype=self.dtype)
        gate, up = (each.data_ptr() for each in memory)
        stride = self.stride(tokens)
        scratch = thread_scratch(stride) if stride else 0
        places = (x, gate), (x, up), (gate, out.data_ptr())
        products = []
        for template, (source, target) in zip(self._products, places, strict=True):
            call = type(template).from_buffer_copy(template)
            call.x, call.out, call.rows = source, target, tokens
            call.scratch, call.stride = scratch, stride
            products.append((self._linear, call))
        activate = type(self._activation).from_buffer_copy(self._activation)
        activate.gate = activate.out = gate
        activate.up, activate.rows = up, tokens
        stages = (*products[:2], (self._activate, activate), products[2])
        return MlpCalls(stages, out, memory)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the MLP's output for contiguous x [..., hidden] of at most 16 tokens."""
        calls = self.calls(x.data_ptr(), x.numel() // self.hidden)
        sequence.run(calls.stages)
        return calls.out.view(x.shape)

    @property
    def forward(self) -> Callable[..., Any]:
        """Return a forward of the module that calls compiled code for up to 16 tokens."""
        limit = FEW * self.hidden

        @outside_graphs
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                args
                or kwargs
                or not 0 < x.numel() <= limit
                or x.dtype is not self.dtype
                or x.device.type != "cpu"
                or not x.is_contiguous()
                or torch.is_grad_enabled()
                or not self.check.passes()
            ):
                return self._original(self.module, x, *args, **kwargs)
            return self(x)

        return forward


class MlpOutput:
    """An MLP's output for some tokens, which is computed when it is first asked for."""

    def __init__(self, mlp: CompiledMlp, x: Tensor) -> None:
        """Make the kernel calls for contiguous x [tokens, hidden]; nothing is computed yet."""
        self._calls, self._x = mlp.calls(x.data_ptr(), len(x)), x
        self._block, self._is_computed = CallBlock(self._calls.stages), False

    def reset(self) -> None:
        """Let the next call compute the output again: x has other values."""
        self._is_computed = False

    def __call__(self) -> Tensor:
        """Return the output [tokens, hidden]."""
        if not self._is_computed:
            self._block.reset()
            self._block.launch()
            self._is_computed = True
        return self._calls.out
