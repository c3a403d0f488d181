"""Compiled attention for the one token of a decode step.

torch's scaled_dot_product_attention takes 0.3 ms a layer for one bfloat16 token with 190 tokens of
context, and 2.5 ms with 1000. The norms, the rotary embedding and the views around it alone take as
long as one compiled call of the attention. Modules of the common kind (`q_proj`, `k_proj`,
`v_proj`, `o_proj`, possibly a norm of each head, rotary positions) get a compiled forward. One
kernel computes rotated queries, keys and values from the hidden state, another one the output from
them. If the KV cache cannot reserve space for a token, its own `update` is called between the two.
Whether a class is of the common kind is tested once, by comparison with its own forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.stored import (
    MatrixRecord,
    all_readable,
    any_stored,
    product_scratch,
    thread_scratch,
    weight_matrix,
)
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
BATCHED_ATTENTION = "greenroom_sdpa"  # replaces sdpa in passes with several sequences
_IMPLEMENTATIONS = {"sdpa", BATCHED_ATTENTION}
_TRIED_CONTEXT = 37  # tokens
_CONTEXT_BLOCK = 64  # tokens whose keys, or values, are decoded at a time (native/attention.hpp)
_LANES = 16  # of a vector in native/simd.hpp; the width of a head is a multiple
# Largest relative distance to the class's own forward that rounding explains.
_NEAR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}

Forward = Callable[..., Any]
Positions = tuple[Tensor, Tensor]  # cosine, sine
Style = tuple[int, float]  # how an RMSNorm applies its weight; its epsilon


class KeyValueView(NamedTuple):
    """One layer's keys and values in a KV cache, with space for one new token.

    Both tensors are [1, kv_heads, capacity, head width], or rows of bytes if they are quantised.
    `tokens` is the number of tokens with the new one, whose key and value are not written yet.
    `format` is the number of a `KeyValueFormat`; 0: the model's type.
    """

    keys: Tensor
    values: Tensor
    tokens: int
    format: int = 0


# (cache, layer) -> view with one more token; None: the cache's `update` must be called.
Reserve = Callable[[Any, int], "KeyValueView | None"]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class OneTokenAttention:
    """The compiled forward of one attention module, for one token.

    `is_common_attention` checks which modules may have one.
    """

    def __init__(
        self,
        module: nn.Module,
        style: Style | None,
        reserve: Reserve,
        verdicts: dict[Any, bool],
        kernels: str = "native",
    ) -> None:
        """Make the compiled forward of an attention module for one token.

        style: how the norm of each head applies its weight, and its epsilon; None: no norm
        reserve: reserves space for one token in a layer's KV cache
        verdicts: cache of `matches_class`, shared by the attention modules of a model
        kernels: products with encoded matrices: native, precise or rounded (matrix.py)
        """
        attention: Any = module
        self.module, self.original = attention, type(module).forward
        self._reserve, self._verdicts = reserve, verdicts
        parts: dict[str, Any] = dict(module._modules)
        weights = [weight_matrix(parts[name]) for name in _LINEAR]
        self.width: int = attention.head_dim
        self.hidden: int = weights[0].shape[1]
        self.heads: int = weights[0].shape[0] // self.width
        self.kv_heads: int = weights[1].shape[0] // self.width
        self.dtype: torch.dtype = weights[0].dtype
        self.check = ModuleCheck()  # addresses are those of these parts
        for name, part in parts.items():
            self.check.require_same(attention._modules, name, part)
            self.check.require_weight(part)
            self.check.require_no_hooks(part)
        self._verdict_key = type(module), self.dtype, style
        self._records = [MatrixRecord(each, kernels) for each in weights]
        matrices = [each.address for each in self._records]
        inputs = max(self.hidden, self.heads * self.width)
        self.stride = 4 * inputs + product_scratch(inputs) if any_stored(weights) else 0
        self._project = kernel_entry("project", self.dtype)
        self._attend = kernel_entry("attend", self.dtype)
        self._project_template = self._make_project_call(parts, matrices[:3], style)
        output: Any = parts[_LINEAR[3]]
        self._attend_template = library().structure("AttendCall")(
            width=self.width,
            key_heads=self.kv_heads,
            group=self.heads // self.kv_heads,
            scale=attention.scaling,
            matrix=matrices[3],
            outputs=weights[3].shape[0],
            bias=_address(output.bias),
            stride=self.stride,
        )

    def _make_project_call(
        self, parts: dict[str, Any], matrices: Sequence[int], style: Style | None
    ) -> Any:
        """Make the call of `project` with the values that are the same for all tokens."""
        how, eps = style or (0, 0.0)
        norms = parts.get("q_norm"), parts.get("k_norm"), None
        counts = self.heads, self.kv_heads, self.kv_heads
        heads: list[Any] = []
        for which, (linear, norm, count) in enumerate(zip(_LINEAR[:3], norms, counts, strict=True)):
            bias = parts[linear].bias
            heads.extend(self._make_heads(matrices[which], bias, norm, count, which < 2))
        self._heads = (library().structure("Head") * len(heads))(*heads)
        return library().structure("ProjectCall")(
            hidden=self.hidden,
            query_heads=self.heads,
            key_heads=self.kv_heads,
            width=self.width,
            eps=eps,
            style=how,
            stride=self.stride,
            heads=ctypes.addressof(self._heads),
        )

    def _make_heads(
        self, matrix: int, bias: Tensor | None, norm: Any, count: int, rotated: bool
    ) -> Iterator[Any]:
        """Describe the heads of one projection for the kernel `project`."""
        biases, nbytes = _address(bias), self.width * self.dtype.itemsize
        for number in range(count):
            yield library().structure("Head")(
                matrix=matrix,
                first=number * self.width,
                bias=biases and biases + number * nbytes,
                norm=_address(norm.weight) if norm else 0,
                rotated=rotated,
            )

    def accepts(self, x: Tensor, positions: Any, mask: Any, cache: Any) -> bool:
        """Check that compiled code can compute a call of the attention module."""
        return self.check.passes() and self.accepts_inputs(x, positions, mask, cache)

    def accepts_inputs(self, x: Tensor, positions: Any, mask: Any, cache: Any) -> bool:
        """Check that compiled code can compute an attention with these inputs, if unchanged."""
        if (
            x.numel() != self.hidden
            or mask is not None
            or cache is None
            or positions is None
            or x.dtype is not self.dtype
            or torch.is_grad_enabled()
            or not x.is_contiguous()
        ):
            return False
        cos, sin = positions
        width = cos.shape[-1]
        return (
            cos.dtype is self.dtype
            and cos.numel() == width == sin.numel()
            and width <= self.width
            and width % 2 == 0
            and cos.is_contiguous()
            and sin.is_contiguous()
            and self._implementation() in _IMPLEMENTATIONS
            and self._matches(width)
        )

    def _implementation(self) -> Any:
        # transformers' configurations look up every attribute in Python.
        configured = object.__getattribute__(self.module.config, "__dict__")
        return configured.get("_attn_implementation_internal")

    def _matches(self, rotary: int) -> bool:
        """Return the cached verdict of `matches_class`."""
        if self._verdict_key not in self._verdicts:
            self._verdicts[self._verdict_key] = matches_class(self, rotary)
        return self._verdicts[self._verdict_key]

    def reserve(self, cache: Any) -> KeyValueView | None:
        """Reserve space for one more token in a layer's KV cache.

        Return None if the cache cannot reserve space.
        """
        return self._reserve(cache, self.module.layer_idx)

    def __call__(self, x: Tensor, positions: Positions, cache: Any) -> Tensor:
        """Return the attention's output for one token x [1, 1, hidden], and extend the KV cache."""
        out = torch.empty(1, 1, self._attend_template.outputs, dtype=self.dtype)
        view = self.reserve(cache)
        if view is not None:
            work = self.workspace(view.tokens)
            sequence.run(self.stages(x.data_ptr(), positions, view, work, out.data_ptr()))
            return out
        k, v = torch.empty(2, 1, self.kv_heads, 1, self.width, dtype=self.dtype).unbind()
        work = self.workspace(1)
        project = self._project_call(x.data_ptr(), positions, KeyValueView(k, v, 1), work)
        self._project(ctypes.addressof(project))
        k, v = cache.update(k, v, self.module.layer_idx)
        if k.dtype is not self.dtype or k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.to(self.dtype).contiguous(), v.to(self.dtype).contiguous()
        view = KeyValueView(k, v, k.shape[2])
        more = self.workspace(view.tokens)
        attend = self._attend_call(work.data_ptr(), view, more, out.data_ptr())
        self._attend(ctypes.addressof(attend))
        return out

    def stages(
        self, x: int, positions: Positions, view: KeyValueView, work: Tensor, out: int
    ) -> tuple[sequence.Stage, sequence.Stage]:
        """Return the two kernel calls that compute one token's attention.

        `x` and `out` are the addresses of the hidden state and of the output. The kernels write the
        token's key and value to the last position of `view`.
        """
        return (
            (self._project, self._project_call(x, positions, view, work)),
            (self._attend, self._attend_call(work.data_ptr(), view, work, out)),
        )

    def batched_stages(
        self, each: Sequence[tuple[sequence.Stage, sequence.Stage]], work: Tensor
    ) -> tuple[sequence.Stage, sequence.Stage]:
        """Merge several tokens' kernel calls for attention into two calls for all tokens.

        `each` has for every token the two calls of `stages`. `work` is float32 memory [4, T,
        `widest`]; its first matrix must hold the T hidden states.
        """
        project, attend = ([call for _, call in stages] for stages in zip(*each, strict=True))
        wide, projected, mixed, out = (part.data_ptr() for part in work)
        return (
            sequence.batch_stage(
                kernel_entry("project_rows", self.dtype), project, wide, projected
            ),
            sequence.batch_stage(kernel_entry("attend_rows", self.dtype), attend, mixed, out),
        )

    @property
    def widest(self) -> int:
        """Return one token's largest number of values before, within and after the attention."""
        return max(self.hidden, (self.heads + 2 * self.kv_heads) * self.width,
                   self._attend_template.outputs)  # fmt: skip

    def workspace(self, context: int, extra: int = 0) -> Tensor:
        """Allocate float32 memory for one attention call over `context` tokens.

        It holds the queries, then scratch memory, then `extra` values for the caller.
        """
        projected = (self.heads + 2 * self.kv_heads) * self.width
        decoded = self.kv_heads * _CONTEXT_BLOCK * self.width
        attended = self.heads * (context + 3 * self.width) + self.kv_heads * self.width + decoded
        return torch.empty(self.heads * self.width + max(projected, attended) + extra)

    def _project_call(self, x: int, positions: Positions, view: KeyValueView, work: Tensor) -> Any:
        """Make the call of `project`; it writes queries to the start of `work`."""
        template, size = self._project_template, view.keys.itemsize
        call = type(template).from_buffer_copy(template)
        (cos, sin), (k, v, tokens, call.format) = positions, view
        call.x, call.rotary = x, cos.shape[-1]
        call.queries = queries = work.data_ptr()
        call.projected = queries + 4 * self.heads * self.width
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.scratch = thread_scratch(self.stride) if self.stride else 0
        _, key_step, key_row, _ = k.stride()
        _, value_step, value_row, _ = v.stride()
        call.keys = k.data_ptr() + size * (tokens - 1) * key_row
        call.values = v.data_ptr() + size * (tokens - 1) * value_row
        call.key_step, call.value_step = size * key_step, size * value_step
        return call

    def _attend_call(self, queries: int, view: KeyValueView, work: Tensor, out: int) -> Any:
        """Make the call of `attend`: queries [heads, width] with the view's tokens."""
        template, size = self._attend_template, view.keys.itemsize
        call = type(template).from_buffer_copy(template)
        k, v, call.context, call.format = view
        call.queries, call.keys, call.values = queries, k.data_ptr(), v.data_ptr()
        _, key_step, key_row, _ = k.stride()
        _, value_step, value_row, _ = v.stride()
        call.key_step, call.key_row = size * key_step, size * key_row
        call.value_step, call.value_row = size * value_step, size * value_row
        nbytes = 4 * self.heads * self.width
        call.mixed = mixed = work.data_ptr() + nbytes
        call.scores, call.out = mixed + nbytes, out
        call.scratch = thread_scratch(self.stride) if self.stride else 0
        return call


class _TrialCache:
    """A one-layer KV cache for the trial of `matches_class`."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)


def matches_class(attention: OneTokenAttention, rotary: int) -> bool:
    """Check that a compiled attention forward equals its module class's, up to rounding.

    Both are called with small and large random inputs: if one forward caps scores or values, the
    outputs for large inputs differ. `rotary` is the number of rotated elements of a head.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(attention.dtype)

    shape = (1, attention.kv_heads, _TRIED_CONTEXT, attention.width)
    for scale in (1.0, 30.0):
        x, positions = (
            draw(1, 1, attention.hidden) * scale,
            (draw(1, 1, rotary), draw(1, 1, rotary)),
        )
        cache = _TrialCache(draw(*shape), draw(*shape))
        expected = attention.original(attention.module, x, positions, None, cache)[0].float()
        distance = (attention(x, positions, cache).float() - expected).norm() / expected.norm()
        if not distance < _NEAR[attention.dtype]:
            return False
    return True


def is_common_attention(module: nn.Module) -> bool:
    """Check that a module has exactly the parts of the attention that can be compiled."""
    parts: dict[str, Any] = module._modules
    tensors = set(module._parameters) | set(module._buffers)
    if not set(_LINEAR) <= set(parts) <= {*_LINEAR, *_NORMS} or tensors:
        return False
    linear = [parts[name] for name in _LINEAR]
    if not all(type(part) is nn.Linear and weight_matrix(part).is_contiguous() for part in linear):
        return False
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts.values()):
        return False
    q, k, v, o = weights = [weight_matrix(part) for part in linear]
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or width % _LANES or not hasattr(module, "layer_idx"):
        return False
    if not isinstance(getattr(module, "scaling", None), float):
        return False
    if {w.dtype for w in weights} != {q.dtype} or q.dtype not in _NEAR:
        return False
    if any(w.device.type != "cpu" for w in weights) or not all_readable(weights):
        return False
    divisible = q.shape[0] % width == 0 and k.shape[0] % width == 0 and q.shape[0] % k.shape[0] == 0
    return bool(divisible and k.shape == v.shape and o.shape[1] == q.shape[0])


def head_norms(module: nn.Module) -> list[nn.Module]:
    """Return an attention module's norms of queries and keys."""
    return [part for name in _NORMS if (part := module._modules.get(name)) is not None]


def attention_forward(attention: OneTokenAttention) -> Forward:
    """Make an attention module's forward, compiled for one token."""
    module, original = attention.module, attention.original

    @outside_graphs
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute one token; calls with positional arguments go to the class's forward."""
        names = ("position_embeddings", "attention_mask", "past_key_values")
        positions, mask, cache = (kwargs.get(name) for name in names)
        if not args and attention.accepts(hidden_states, positions, mask, cache):
            return attention(hidden_states, positions, cache), None  # type: ignore[arg-type]
        return original(module, hidden_states, *args, **kwargs)

    return forward
