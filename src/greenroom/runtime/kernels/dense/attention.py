"""A faster attention for the one token of a decode step, around the model's own KV cache.

torch's scaled_dot_product_attention takes 0.3 ms a layer for one bfloat16 token with 190 tokens
of context, and 2.5 ms with 1000; norms, rotary and the views around them cost as much again as
one compiled call. Modules of the common kind (`q_proj`, `k_proj`, `v_proj`, `o_proj`, perhaps a
norm of each head, rotary positions) get a forward of their own: from the hidden state to rotated
queries, keys and values, and from there to the output, with the cache's own `update` between where
it has no room. Whether a class is of that kind is found by trying: its own forward is the judge.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.codegen.entries import heads
from greenroom.runtime.kernels.codegen.llvm.target import LANES
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.dense.stored import (
    MatrixRecord,
    coded,
    readable,
    room,
    scratch,
    weight_matrix,
)
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.launch.sequence import bits

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
BATCHED_ATTENTION = "greenroom_sdpa"  # in place of sdpa, where a pass has several sequences
_IMPLEMENTATIONS = {"sdpa", BATCHED_ATTENTION}
_TRIED_CONTEXT = 37  # tokens
# Relative distance to the class's own forward that rounding alone can explain.
_NEAR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}

Forward = Callable[..., Any]
Positions = tuple[Tensor, Tensor]  # cosine, sine
Style = tuple[int, float]  # how an RMSNorm applies its weight, its epsilon


class KeyValueView(NamedTuple):
    """A layer's keys and values [1, kv_heads, `tokens` or more, width]; the last token is unset."""

    keys: Tensor
    values: Tensor
    tokens: int


# (cache, layer) -> room for one more token, or None: the cache must be updated.
Reserve = Callable[[Any, int], "KeyValueView | None"]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _words(count: int, values: dict[int, int]) -> array[int]:
    """An array of int64 words, those that are named set."""
    return array("q", [values.get(index, 0) for index in range(count)])


class OneTokenAttention:
    """One attention module's compiled forward; `fits` says whether a module may have one."""

    def __init__(
        self,
        module: nn.Module,
        style: Style | None,
        reserve: Reserve,
        tried: dict[Any, bool],
        rounded: bool = False,
    ) -> None:
        """`tried` remembers the verdict on a class; `rounded` as for `Matrix`."""
        own: Any = module
        self.module, self.original = own, type(module).forward
        self._reserve, self._tried = reserve, tried
        parts: dict[str, Any] = dict(module._modules)
        weights = [weight_matrix(parts[name]) for name in _LINEAR]
        self.width: int = own.head_dim
        self.hidden: int = weights[0].shape[1]
        self.heads: int = weights[0].shape[0] // self.width
        self.kv_heads: int = weights[1].shape[0] // self.width
        self.dtype: torch.dtype = weights[0].dtype
        self.guard = ModuleCheck()  # that the parts are those that the addresses are taken from
        for name, part in parts.items():
            self.guard.same(own._modules, name, part)
            self.guard.weight(part)
            self.guard.unheard(part)
        self._key = type(module), self.dtype, style
        by_code = coded(weights)
        self._records = [MatrixRecord(weight, rounded) for weight in weights] if by_code else []
        matrices = [each.address for each in self._records] or [w.data_ptr() for w in weights]
        inputs = max(self.hidden, self.heads * self.width)
        self.stride = 4 * inputs + room(inputs) if by_code else 0
        self._project = kernel_entry(heads.project, self.dtype, by_code)
        self._attend = kernel_entry(heads.attend, self.dtype, by_code)
        self._projecting = self._to_all_heads(parts, matrices[:3], style)
        self._attending = _words(
            heads.ATTEND_ARGUMENTS,
            {
                heads.A_WIDTH: self.width,
                heads.A_KV_HEADS: self.kv_heads,
                heads.GROUP: self.heads // self.kv_heads,
                heads.SCALE: bits(own.scaling),
                heads.A_W: matrices[3],
                heads.A_ROWS: weights[3].shape[0],
                heads.A_BIAS: _address(parts[_LINEAR[3]].bias),
                heads.A_STRIDE: self.stride,
            },
        )

    def _to_all_heads(
        self, parts: dict[str, Any], matrices: Sequence[int], style: Style | None
    ) -> array[int]:
        """The constant words of `project`."""
        code, eps = style or (0, 0.0)
        words = _words(
            heads.PROJECT_ARGUMENTS,
            {
                heads.HIDDEN: self.hidden,
                heads.Q_HEADS: self.heads,
                heads.KV_HEADS: self.kv_heads,
                heads.WIDTH: self.width,
                heads.EPS: bits(eps),
                heads.STYLE: code,
                heads.STRIDE: self.stride,
            },
        )
        norms = parts.get("q_norm"), parts.get("k_norm"), None
        counts = self.heads, self.kv_heads, self.kv_heads
        for which, (linear, norm, count) in enumerate(zip(_LINEAR[:3], norms, counts, strict=True)):
            bias = parts[linear].bias
            words.extend(self._of_heads(matrices[which], bias, norm, count, which < 2))
        return words

    def _of_heads(
        self, matrix: int, bias: Tensor | None, norm: Any, count: int, rotated: bool
    ) -> Iterator[int]:
        """The words of a projection's heads."""
        first = _address(bias)
        for head in range(count):
            yield matrix
            yield head * self.width
            yield first and first + head * self.width * self.dtype.itemsize
            yield _address(norm.weight) if norm else 0
            yield int(rotated)

    def takes(self, x: Tensor, positions: Any, mask: Any, cache: Any) -> bool:
        """Is this call one that the compiled bodies know?"""
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
            and self.module.config.__dict__.get("_attn_implementation_internal") in _IMPLEMENTATIONS
            and self.guard.holds()
            and self._sound(width)
        )

    def _sound(self, rotary: int) -> bool:
        """Does the compiled forward compute what this class does? Found out once."""
        if self._key not in self._tried:
            self._tried[self._key] = try_out(self, rotary)
        return self._tried[self._key]

    def room(self, cache: Any) -> KeyValueView | None:
        """Room for one more token in a cache, or None."""
        return self._reserve(cache, self.module.layer_idx)

    def __call__(self, x: Tensor, positions: Positions, cache: Any) -> Tensor:
        """The attention's output for x [1, 1, hidden], whose keys and values join the cache."""
        out = torch.empty(1, 1, self._attending[heads.A_ROWS], dtype=self.dtype)
        room = self.room(cache)
        if room is not None:
            work = self.work(room.tokens)
            sequence.run(self.stages(x.data_ptr(), positions, room, work, out.data_ptr()))
            return out
        k, v = torch.empty(2, 1, self.kv_heads, 1, self.width, dtype=self.dtype).unbind()
        work = self.work(1)
        words = self._to_project(x.data_ptr(), positions, KeyValueView(k, v, 1), work)
        self._project(words.buffer_info()[0])
        k, v = cache.update(k, v, self.module.layer_idx)
        if k.dtype is not self.dtype or k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.to(self.dtype).contiguous(), v.to(self.dtype).contiguous()
        room = KeyValueView(k, v, k.shape[2])
        more = self.work(room.tokens)
        words = self._to_attend(work.data_ptr(), room, more, out.data_ptr())
        self._attend(words.buffer_info()[0])
        return out

    def stages(
        self, x: int, positions: Positions, room: KeyValueView, work: Tensor, out: int
    ) -> tuple[sequence.Stage, sequence.Stage]:
        """From the hidden state at address x to the attention's output at address out.

        The room's last token is this one, to be written.
        """
        return (
            (self._project, self._to_project(x, positions, room, work)),
            (self._attend, self._to_attend(work.data_ptr(), room, work, out)),
        )

    def stages_of_rows(
        self, each: Sequence[tuple[sequence.Stage, sequence.Stage]], work: Tensor
    ) -> tuple[sequence.Stage, sequence.Stage]:
        """The stages of several tokens, from those of each. `work` [4, T, `widest`] begins with
        their hidden states [T, hidden] in float32."""
        project, attend = ([words for _, words in stages] for stages in zip(*each, strict=True))
        wide, projected, mixed, out = (part.data_ptr() for part in work)
        by_code = bool(self.stride)
        return (
            sequence.of_rows(
                kernel_entry(heads.project_rows, self.dtype, by_code), project, wide, projected
            ),
            sequence.of_rows(
                kernel_entry(heads.attend_rows, self.dtype, by_code), attend, mixed, out
            ),
        )

    @property
    def widest(self) -> int:
        """Values that a token has at most, in and around the attention."""
        return max(self.hidden, (self.heads + 2 * self.kv_heads) * self.width,
                   self._attending[heads.A_ROWS])  # fmt: skip

    def work(self, context: int, beside: int = 0) -> Tensor:
        """Memory for a call, in float32 words: queries, then what one of the bodies needs, then
        what the caller wants `beside`."""
        projected = (self.heads + 2 * self.kv_heads) * self.width
        attended = self.heads * (context + 3 * self.width) + self.kv_heads * self.width
        return torch.empty(self.heads * self.width + max(projected, attended) + beside)

    def _to_project(
        self, x: int, positions: Positions, room: KeyValueView, work: Tensor
    ) -> array[int]:
        """The words of `project`; queries are left at the beginning of `work`."""
        words, size = array("q", self._projecting), self.dtype.itemsize
        cos, sin = positions
        words[heads.X], words[heads.ROTARY] = x, cos.shape[-1]
        words[heads.Q_OUT] = queries = work.data_ptr()
        words[heads.SCRATCH] = queries + 4 * self.heads * self.width
        words[heads.COS], words[heads.SIN] = cos.data_ptr(), sin.data_ptr()
        words[heads.MEMORY] = scratch(self.stride) if self.stride else 0
        for tensor, out, step in (
            (room.keys, heads.K_OUT, heads.K_STEP),
            (room.values, heads.V_OUT, heads.V_STEP),
        ):
            _, step_of_head, step_of_token, _ = tensor.stride()
            words[out] = tensor.data_ptr() + size * (room.tokens - 1) * step_of_token
            words[step] = size * step_of_head
        return words

    def _to_attend(self, queries: int, room: KeyValueView, work: Tensor, out: int) -> array[int]:
        """The words of `attend`: queries [heads * width] over the room's keys and values."""
        words, size = array("q", self._attending), self.dtype.itemsize
        k, v, words[heads.CONTEXT] = room
        words[heads.Q] = queries
        words[heads.K], words[heads.V] = k.data_ptr(), v.data_ptr()
        _, words[heads.K_HEAD], words[heads.K_ROW], _ = (size * n for n in k.stride())
        _, words[heads.V_HEAD], words[heads.V_ROW], _ = (size * n for n in v.stride())
        words[heads.MIXED] = work.data_ptr() + 4 * self.heads * self.width
        words[heads.SCORES] = words[heads.MIXED] + 4 * self.heads * self.width
        words[heads.A_OUT] = out
        words[heads.A_MEMORY] = scratch(self.stride) if self.stride else 0
        return words


class _Remembered:
    """A KV cache of one layer for the trial."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)


def try_out(one: OneTokenAttention, rotary: int) -> bool:
    """Does the compiled forward give what the class's own gives, but for rounding?

    On small inputs and on large ones, where a cap on scores or values would show.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(one.dtype)

    shape = (1, one.kv_heads, _TRIED_CONTEXT, one.width)
    for scale in (1.0, 30.0):
        x, positions = draw(1, 1, one.hidden) * scale, (draw(1, 1, rotary), draw(1, 1, rotary))
        cache = _Remembered(draw(*shape), draw(*shape))
        wanted = one.original(one.module, x, positions, None, cache)[0].float()
        distance = (one(x, positions, cache).float() - wanted).norm() / wanted.norm()
        if not distance < _NEAR[one.dtype]:
            return False
    return True


def fits(module: nn.Module) -> bool:
    """Has a module the parts of the common attention, and no others?"""
    parts: dict[str, Any] = module._modules
    own = set(module._parameters) | set(module._buffers)
    if not set(_LINEAR) <= set(parts) <= {*_LINEAR, *_NORMS} or own:
        return False
    linear = [parts[name] for name in _LINEAR]
    if not all(type(part) is nn.Linear and weight_matrix(part).is_contiguous() for part in linear):
        return False
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts.values()):
        return False
    q, k, v, o = weights = [weight_matrix(part) for part in linear]
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or width % LANES or not hasattr(module, "layer_idx"):
        return False
    if not isinstance(getattr(module, "scaling", None), float):
        return False
    if {w.dtype for w in weights} != {q.dtype} or q.dtype not in _NEAR:
        return False
    if any(w.device.type != "cpu" for w in weights) or not readable(weights):
        return False
    whole = q.shape[0] % width == 0 and k.shape[0] % width == 0 and q.shape[0] % k.shape[0] == 0
    return bool(whole and k.shape == v.shape and o.shape[1] == q.shape[0])


def norms_of(module: nn.Module) -> list[nn.Module]:
    """The norms of queries and keys that an attention has."""
    return [part for name in _NORMS if (part := module._modules.get(name)) is not None]


def attention_forward(one: OneTokenAttention) -> Forward:
    """An attention's forward, compiled for one token."""
    module, original = one.module, one.original

    @outside_graphs
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Models name what they give; what comes without names is left to the class."""
        names = ("position_embeddings", "attention_mask", "past_key_values")
        positions, mask, cache = (kwargs.get(name) for name in names)
        if not args and one.takes(hidden_states, positions, mask, cache):
            return one(hidden_states, positions, cache), None  # type: ignore[arg-type]
        return original(module, hidden_states, *args, **kwargs)

    return forward
