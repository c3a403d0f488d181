"""A router of the common kind for one token, compiled.

    softmax of x @ w.T in float32, the top k of it, perhaps over their sum, cast

In the region that ends with its input (decoder.py) it costs its weights' bytes; torch's five
operations cost ten times that where a group of experts has gone through the caches. The product is
summed in another order than torch's and rounded to the model's type as torch's is, so as in other
compiled layers a last bit may differ. Where the last expert that is chosen and the next are equal
the choice is torch's still (ties.py). That a router is of this kind is found by trying it.

The module gets this choice as its own forward for one token: it is called wherever somebody listens
to it, as predictors do, and what listens must not change a bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from greenroom.runtime.graphs import outside_graphs
from greenroom.runtime.kernels.codegen.entries import choice, layers, ties
from greenroom.runtime.kernels.dense.module_check import ModuleCheck
from greenroom.runtime.kernels.launch import sequence
from greenroom.runtime.kernels.launch.openmp import kernel_entry

_TRIALS = 48
_AGREE = 45  # of them: a last bit may decide between two experts
_NEAR = 2e-2
_ODD = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)


class RouterCall:
    """A choice to be made: the stages that make it, after which `answer` has it."""

    __slots__ = ("_router", "_words", "ids", "stages", "weights")

    def __init__(self, router: CompiledRouter, x: int) -> None:
        """For the hidden state at address x."""
        self._router = router
        self.ids = torch.empty(1, router.top_k, dtype=torch.int64)
        self.weights = torch.empty(1, router.top_k, dtype=router.dtype)
        product, words = array("q", router.product), array("q", router.choice)
        start = words.buffer_info()[0]
        scores, products, order = (start + 8 * at for at in router.places)
        words[choice.SCORES], words[choice.PRODUCTS] = scores, products
        words[choice.S_ORDER] = order if router.knows_ties else 0
        words[choice.S_IDS], words[choice.S_WEIGHTS] = self.ids.data_ptr(), self.weights.data_ptr()
        product[layers.X], product[layers.OUT] = x, words[choice.PRODUCTS]
        self._words = words
        self.stages: tuple[sequence.Stage, ...] = (
            (router.multiply, product),
            (router.select, words),
        )

    def answer(self) -> tuple[Tensor, Tensor]:
        """(ids [1, top_k] of the experts, their weights)."""
        if self._words[choice.S_CHOSEN]:
            return self.ids, self.weights
        return self._router.by_torch(self.products)

    @property
    def found(self) -> int:
        """The address of a word that is 0 where the choice is torch's."""
        return self._words.buffer_info()[0] + 8 * choice.S_CHOSEN

    @property
    def products(self) -> Tensor:
        """x times the router's matrix [1, experts], rounded to the model's type."""
        router = self._router
        found = torch.frombuffer(
            self._words,
            dtype=router.weight.dtype,
            count=len(router.weight),
            offset=8 * router.places[1],
        )
        return found[None]


class CompiledRouter:
    """One router's choice for one token; `of` says whether it is of this kind."""

    def __init__(
        self, module: nn.Module, top_k: int, summed: bool, dtype: torch.dtype, scored: bool = False
    ) -> None:
        """`summed`: are weights, which have this type, divided by their sum? `scored`: does the
        module return all experts' softmax, where others return their products?"""
        self.module, self.top_k, self._summed, self.dtype = module, top_k, summed, dtype
        self._scored, self._original = scored, type(module).forward
        self.weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        self._known = ModuleCheck()
        self._known.weight(module)
        self._known.unheard(module)
        self.multiply = kernel_entry(layers.gemv, self.weight.dtype, False)
        self.select = kernel_entry(choice.select, self.weight.dtype, dtype is torch.float32)
        self.product = array("q", [0] * (layers.OUT_WIDE + 1))
        self.product[layers.W], self.product[layers.X_ROWS] = self.weight.data_ptr(), 1
        self.product[layers.W_ROWS], self.product[layers.W_COLUMNS] = self.weight.shape
        number = len(self.weight)
        scores = choice.S_BEST + -(-(top_k + 1) * 3 // 2)  # words of ids and of float32
        half = -(-number // 2)
        self.places = scores, scores + half, scores + 2 * half  # products and ids follow scores
        self.choice = array("q", [0] * (self.places[2] + number))
        self.choice[choice.S_NUMBER], self.choice[choice.S_TOP_K] = number, top_k
        self.choice[choice.NORMALISED] = int(summed)
        self.knows_ties = ties.is_supported(number, top_k)
        if self.knows_ties:
            self.knows_ties = _ties_tried(self)

    @staticmethod
    def of(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> CompiledRouter | None:
        """One for a router of x in `dtype`, of this shape for one token, or None."""
        weight = module._parameters.get("weight")
        parts = len(module._parameters), len(module._buffers), len(module._modules)
        if parts != (1, 0, 0) or weight is None or weight.dtype is not dtype:
            return None
        if weight.dim() != 2 or weight.shape[1] != shape[-1] or weight.device.type != "cpu":
            return None
        if "forward" in module.__dict__ or not weight.is_contiguous():
            return None
        return _tried(module, shape, dtype)

    def intact(self) -> bool:
        """Is the module still what it was, and does nobody listen to it?"""
        own = vars(self.module).get("forward", self.forward)
        return self._known.holds() and own == self.forward

    @property
    def guard(self) -> ModuleCheck:
        """That it is, with the forward that it has now, where that is the class's or this one."""
        guard, own = ModuleCheck(), vars(self.module).get("forward")
        guard.include(self._known)
        known = own is None or own == self.forward
        guard.same(vars(self.module), "forward", own if known else self.forward)
        return guard

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [1, top_k] of the experts that x [1, hidden] goes to, their weights)."""
        asked = RouterCall(self, x.data_ptr())
        sequence.run(asked.stages)
        return asked.answer()

    @outside_graphs
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's: (products or softmax of all experts, weights, ids), compiled for one."""
        if (
            args
            or kwargs
            or x.numel() != self.weight.shape[1]
            or x.dtype is not self.weight.dtype
            or not x.is_contiguous()
            or torch.is_grad_enabled()
            or self.module._parameters["weight"] is not self.weight
        ):
            return self._original(self.module, x, *args, **kwargs)
        asked = RouterCall(self, x.data_ptr())
        sequence.run(asked.stages)
        ids, weights = asked.answer()
        return self.of_all(asked.products), weights, ids

    def of_all(self, products: Tensor) -> Tensor:
        """What the module returns of all experts."""
        return products.softmax(-1, dtype=torch.float32) if self._scored else products

    def by_torch(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """The choice where it is torch's, from the products [1, experts]."""
        values, ids = products.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self._summed:
            values = values / values.sum(-1, keepdim=True)
        return ids, values.to(self.dtype)


_TIES: dict[Hashable, bool] = {}  # what came of trying, by the kind of router


@torch.no_grad()
def _ties_tried(router: CompiledRouter) -> bool:
    """Does `ties` choose among equal scores as this torch does?"""
    key = len(router.weight), router.top_k, router.weight.dtype, router.dtype
    if key not in _TIES:
        random = torch.Generator().manual_seed(0)
        _TIES[key] = all(_tie_agrees(router, random) for _ in range(_TRIALS))
    return _TIES[key]


def _tie_agrees(router: CompiledRouter, random: torch.Generator) -> bool:
    """Are the experts torch's where many products are equal?"""
    asked = RouterCall(router, 0)
    asked.products.copy_(torch.randint(-4, 4, asked.products.shape, generator=random) / 4)
    sequence.run(asked.stages[1:])
    found, wanted = (
        ids.sort().values for ids, _ in (asked.answer(), router.by_torch(asked.products))
    )
    return torch.equal(found, wanted)


@torch.no_grad()
def _tried(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> CompiledRouter | None:
    """The router that gives the module's own answers, on small inputs and on large ones."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(_TRIALS, *shape, generator=random)
    scales = torch.logspace(-1, 1.5, _TRIALS).view(-1, *(1 for _ in shape))
    inputs = (inputs * scales).to(dtype)
    own = type(module).forward
    try:
        answers = [_answer(own(module, x)) for x in inputs]
    except _ODD:
        return None
    if not all(answers):
        return None
    first, weights, ids = answers[0]  # type: ignore[misc]
    for summed in (True, False):
        made = CompiledRouter(
            module, ids.shape[1], summed, weights.dtype, first.dtype is torch.float32
        )
        pairs = zip((made.forward(x) for x in inputs), answers, strict=True)
        if sum(_alike(mine, answer) for mine, answer in pairs) >= _AGREE:
            return made
    return None


def _answer(out: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """(of all experts, weights, ids) of what a router returns, where it is of that form."""
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(t, Tensor) for t in out)):
        return None
    of_all, weights, ids = out
    floats = weights.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if ids.dtype is not torch.int64 or not floats or ids.shape != weights.shape:
        return None
    return (of_all, weights, ids) if ids.dim() == 2 and len(ids) == 1 else None


def _alike(mine: tuple[Tensor, Tensor, Tensor], answer: Any) -> bool:
    """Are these the same, but for last bits?"""
    if mine[0].shape != answer[0].shape or mine[0].dtype is not answer[0].dtype:
        return False
    both = [_spread(*each) for each in (mine, answer)]
    return all(_near(ours, theirs) for ours, theirs in [(mine[0], answer[0]), both])


def _spread(of_all: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A choice as the weights of all experts."""
    return torch.zeros(1, of_all.shape[-1]).scatter_add_(1, ids, weights.float())


def _near(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = ours.float(), theirs.float()
    return bool((ours - theirs).norm() <= _NEAR * theirs.norm())
