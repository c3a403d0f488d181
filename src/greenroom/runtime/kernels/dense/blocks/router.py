"""A compiled top-k router of an MoE block, for one token.

    softmax of x @ w.T in float32, its top k, possibly divided by their sum, cast

or, where the router has a bias for its choice and computes in float32 throughout,

    sigmoid of x @ w.T for the top k of sigmoid + bias, perhaps divided by their sum, times a factor

In the parallel region that computes its input (decoder.py) the router takes only as long as reading
its weights; torch's five operations take ten times as long after a group of experts has evicted the
CPU caches. The product is summed in another order than torch's and rounded to the model's type as
torch's is, so a last bit may differ, as in other compiled layers. If the last chosen score equals
the next one, the experts are chosen in torch's order (native/router.cpp). Whether a router is of
this kind is tested by comparison with its own forward.

The module gets the compiled choice as its own forward for one token. If hooks observe the module,
as those of predictors do, this forward is called, so that hooks do not change the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.dense.blocks.router_call import RouterCall
from greenroom.runtime.kernels.dense.module_check import InputHook, ModuleCheck
from greenroom.runtime.kernels.dense.stored import MatrixRecord
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library

_TRIALS = 48
_AGREE = 45  # trials: a last bit may decide between two experts
_NEAR = 2e-2
_LEAST_SUM = 1e-20  # added to the sum of a sigmoid router's gate weights
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)


class RouterSettings(NamedTuple):
    """How a router makes gate weights from the chosen scores.

    summed: are they divided by their sum?
    scale:  by which they are multiplied then
    """

    summed: bool
    scale: float = 1.0


class CompiledRouter:
    """The compiled forward of one MoE router, for one token.

    `CompiledRouter.of` makes it for routers of a supported kind.
    """

    def __init__(
        self,
        module: nn.Module,
        top_k: int,
        settings: RouterSettings,
        dtype: torch.dtype,
        scored: bool = False,
    ) -> None:
        """Make the compiled forward of an MoE router.

        dtype: type of the gate weights
        scored: is the module's first output the softmax over all experts, rather than the logits?
        """
        self.module, self.top_k, self.settings, self.dtype = module, top_k, settings, dtype
        self._scored, self._original = scored, type(module).forward
        self.weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        self._bias = _choice_bias(module)
        self.in_float32 = self._bias is not None
        self.logits = torch.float32 if self.in_float32 else self.weight.dtype
        self._tensors_check = ModuleCheck()
        self._tensors_check.require_weight(module)
        for name, buffer in module._buffers.items():
            self._tensors_check.require_same(module._buffers, name, buffer)
        self._check = ModuleCheck()
        self._check.include(self._tensors_check)
        self._check.require_no_hooks(module)
        self.multiply = kernel_entry("linear", self.weight.dtype)
        self.select = kernel_entry("select", self.logits)
        linear = library().structure("LinearCall")
        self.copy_product = linear.from_buffer_copy
        self._matrix = MatrixRecord(self.weight)
        self.product = linear(matrix=self._matrix.address, rows=1)
        self.product.outputs, self.product.inputs = self.weight.shape
        self.select_rows = kernel_entry("select_rows", self.logits)
        self._row = len(self.weight) * self.logits.itemsize  # bytes of a token's logits
        structure = library().structure("Choice")
        self._copy_choice = structure.from_buffer_copy
        self.choice = structure(
            experts=len(self.weight),
            top_k=top_k,
            summed=settings.summed,
            wide=dtype is torch.float32,
            knows_ties=True,
            bias=None if self._bias is None else self._bias.data_ptr(),
            least_sum=0 if self._bias is None else _LEAST_SUM,
            scale=settings.scale,
        )
        # Equal sums in float32 are too rare to be worth torch's order.
        self.choice.knows_ties = self.knows_ties = not self.in_float32 and _ties_match_torch(self)

    @staticmethod
    def of(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> CompiledRouter | None:
        """Compile a router for one token; return None for unsupported kinds of routers.

        `shape` and `dtype` are those of the router's input for one token.
        """
        weight = module._parameters.get("weight")
        if len(module._parameters) != 1 or module._modules or weight is None:
            return None
        if weight.dtype is not dtype or (module._buffers and _choice_bias(module) is None):
            return None
        if weight.dim() != 2 or weight.shape[1] != shape[-1] or weight.device.type != "cpu":
            return None
        if "forward" in module.__dict__ or not weight.is_contiguous():
            return None
        return _find_router(module, shape, dtype)

    def memory_of(self, tokens: int) -> Any:
        """Return the type of memory for the logits of some tokens."""
        return ctypes.c_byte * (tokens * self._row)

    def choice_of(self, token: int, products: int, ids: int, weights: int) -> Any:
        """Return the call that chooses experts for one of some tokens.

        products, ids, weights: addresses of the first token's logits, chosen ids and gate weights
        """
        choice = self._copy_choice(self.choice)
        choice.logits = products + token * self._row
        choice.ids = ids + 8 * token * self.top_k
        choice.weights = weights + token * self.top_k * self.dtype.itemsize
        return choice

    def is_unchanged(self) -> bool:
        """Check that the router module is unchanged and has no hooks."""
        forward = vars(self.module).get("forward", self.forward)
        return self._check.passes() and forward == self.forward

    @property
    def check(self) -> ModuleCheck:
        """Return a check that the router module and its forward are unchanged.

        The forward may be the class's or the compiled one.
        """
        guard = ModuleCheck()
        guard.include(self._check)
        self._require_forward(guard)
        return guard

    @property
    def observed_check(self) -> ModuleCheck:
        """Return a check like `check` that allows hooks which only read the router's input."""
        guard = ModuleCheck()
        guard.include(self._tensors_check)
        guard.require_input_hooks(self.module)
        self._require_forward(guard)
        return guard

    def _require_forward(self, guard: ModuleCheck) -> None:
        forward = vars(self.module).get("forward")
        is_own = forward is None or forward == self.forward
        guard.require_same(vars(self.module), "forward", forward if is_own else self.forward)

    @property
    def input_hooks(self) -> Iterable[InputHook]:
        """Return the hooks that read the router's input, if `observed_check` passes."""
        return self.module._forward_pre_hooks.values()  # type: ignore[return-value]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expert ids and gate weights [1, top_k] for one token's x [1, hidden]."""
        call = RouterCall(self, x.data_ptr())
        sequence.run(call.stages)
        return call.result()

    @outside_graphs
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the router's forward: (logits or softmax of all experts, gate weights, ids).

        Compiled code computes one token; the class's forward computes all other inputs.
        """
        if (
            args
            or kwargs
            or x.numel() != self.weight.shape[1]
            or x.dtype is not self.weight.dtype
            or not x.is_contiguous()
            or torch.is_grad_enabled()
            or not self._tensors_check.passes()
        ):
            return self._original(self.module, x, *args, **kwargs)
        call = RouterCall(self, x.data_ptr())
        sequence.run(call.stages)
        ids, weights = call.result()
        return self.all_scores(call.products), weights, ids

    def all_scores(self, products: Tensor) -> Tensor:
        """Compute the router module's output for all experts from its logits."""
        if self._scored and not self.in_float32:
            return products.softmax(-1, dtype=torch.float32)
        return products

    def choose_by_torch(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts from the router's logits [1, experts] by torch's operations.

        Return (expert ids, gate weights), both [1, top_k].
        """
        if self._bias is None:
            values, ids = products.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
            if self.settings.summed:
                values = values / values.sum(-1, keepdim=True)
            return ids, values.to(self.dtype)
        scores = products.sigmoid()
        ids = (scores + self._bias).topk(self.top_k, dim=-1, sorted=False).indices
        values = scores.gather(1, ids)
        if self.settings.summed:
            values = values / (values.sum(-1, keepdim=True) + _LEAST_SUM)
        return ids, (values * self.settings.scale).to(self.dtype)


def _choice_bias(module: nn.Module) -> Tensor | None:
    """Return a router's only buffer if it can be a bias for the choice of experts [experts]."""
    buffers = list(module._buffers.values())
    bias = buffers[0] if len(buffers) == 1 else None
    weight = module._parameters.get("weight")
    if bias is None or weight is None or bias.shape != weight.shape[:1]:
        return None
    fits = bias.dtype is torch.float32 and bias.is_contiguous() and bias.device.type == "cpu"
    return bias if fits else None


_TIES: dict[Hashable, bool] = {}  # verdicts of `_ties_match_torch` by kind of router


@torch.no_grad()
def _ties_match_torch(router: CompiledRouter) -> bool:
    """Does the compiled choice order equal scores as the installed torch does?"""
    key = len(router.weight), router.top_k, router.weight.dtype, router.dtype
    if key not in _TIES:
        random = torch.Generator().manual_seed(0)
        _TIES[key] = all(_tie_agrees(router, random) for _ in range(_TRIALS))
    return _TIES[key]


def _tie_agrees(router: CompiledRouter, random: torch.Generator) -> bool:
    """Does the compiled choice equal torch's where many logits are equal?"""
    call = RouterCall(router, 0)
    call.products.copy_(torch.randint(-4, 4, call.products.shape, generator=random) / 4)
    sequence.run(call.stages[1:])
    ours, expected = (
        ids.sort().values for ids, _ in (call.result(), router.choose_by_torch(call.products))
    )
    return call.is_chosen and torch.equal(ours, expected)


_SETTINGS: dict[Hashable, RouterSettings] = {}  # by kind of router


@torch.no_grad()
def _find_router(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> CompiledRouter | None:
    """Find the router's settings by the module's own outputs, on small and large inputs.

    The first router of a kind is tried on all inputs, the next ones on the smallest and the
    largest: a model has one in each layer.
    """
    inputs = _inputs(shape, dtype)
    kind = _kind(module, shape, dtype)
    if (settings := _SETTINGS.get(kind)) is not None:
        router = _agreeing(module, inputs[[0, -1]], (settings,), 2)
        if router is not None:
            return router
    scales = {1.0}
    if module._buffers:
        numbers = (each for each in vars(module).values() if type(each) in (int, float))
        scales.update(float(each) for each in numbers if each > 0)
    options = [RouterSettings(*each) for each in product((True, False), sorted(scales))]
    router = _agreeing(module, inputs.clone(), options, _AGREE)
    if router is not None:
        _SETTINGS[kind] = router.settings
    return router


@lru_cache(maxsize=1)
def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random inputs of a router, from small to large; the last ones are stored."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(_TRIALS, *shape, generator=random)
    scales = torch.logspace(-1, 1.5, _TRIALS).view(-1, *(1 for _ in shape))
    return (inputs * scales).to(dtype)


def _kind(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Hashable:
    """What routers with the same function of their weights have in common."""
    plain = (bool, int, float, str)
    values = tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain))
    weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
    return type(module), type(module).forward, shape, dtype, weight.shape, values


def _agreeing(
    module: nn.Module, inputs: Tensor, options: Sequence[RouterSettings], least: int
) -> CompiledRouter | None:
    """Compile a router that agrees with its module on at least so many inputs.

    `options` are the settings to try.
    """
    forward = type(module).forward
    try:
        answers = [_parse_output(forward(module, x)) for x in inputs]
    except _ODD:
        return None
    if not all(answers):
        return None
    first, weights, ids = answers[0]  # type: ignore[misc]
    for settings in options:
        router = CompiledRouter(
            module, ids.shape[1], settings, weights.dtype, first.dtype is torch.float32
        )
        pairs = zip((router.forward(x) for x in inputs), answers, strict=True)
        if sum(_agrees(mine, answer) for mine, answer in pairs) >= least:
            return router
    return None


def _parse_output(out: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (scores of all experts, weights, ids) if a router's output has this form."""
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(t, Tensor) for t in out)):
        return None
    all_scores, weights, ids = out
    floats = weights.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if ids.dtype is not torch.int64 or not floats or ids.shape != weights.shape:
        return None
    return (all_scores, weights, ids) if ids.dim() == 2 and len(ids) == 1 else None


def _agrees(mine: tuple[Tensor, Tensor, Tensor], answer: Any) -> bool:
    """Are two outputs of a router the same, except for last bits?"""
    if mine[0].shape != answer[0].shape or mine[0].dtype is not answer[0].dtype:
        return False
    both = [_dense_weights(*each) for each in (mine, answer)]
    return all(_is_near(ours, theirs) for ours, theirs in [(mine[0], answer[0]), both])


def _dense_weights(all_scores: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Scatter the gate weights of chosen experts to a vector of all experts."""
    return torch.zeros(1, all_scores.shape[-1]).scatter_add_(1, ids, weights.float())


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = ours.float(), theirs.float()
    return bool((ours - theirs).norm() <= _NEAR * theirs.norm())
