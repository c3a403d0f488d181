"""MoE routers with linear scores: recognised by trials, computed by a compiled product.

Nearly all routers rank experts by f(W x + b) + c, with hidden states x, a weight W, a bias b, a
correction c and a monotone function f; some scale x before. Which tensor of a router is which, and
the function, are recognised by the router's results for random inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from ctypes import addressof
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from greenroom.core.predictor import Inputs
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.kernels.native.library import library, missing_reason
from greenroom.runtime.probes.routers import Router

Floats = NDArray[np.float32]
ROWS = 256  # random inputs
FEW_ROWS = 12  # for a router whose kind is known; as many of each scale
LEAST_AGREEMENT = 0.99  # share of the inputs; the rest may be ties
MOST_GEMV_TOKENS = 4  # up to so many tokens, each is a matrix-vector product
_COMPILED = {torch.bfloat16, torch.float16, torch.float32}
_SCALES = (0.3, 1.0, 3.0)  # of random inputs, for which a sigmoid is nearly linear or nearly a step


FUNCTIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=1),
    "root of softplus": lambda x: softplus(x).sqrt(),
}


@dataclass(frozen=True)
class Linear:
    """Linear formula of an MoE router's scores: f(weight @ (scale * x) + bias) + correction.

    `function` is the name of f in `FUNCTIONS`. `weight` shares the memory of the router's matrix,
    if this is contiguous and on the CPU.
    """

    weight: Tensor  # [experts, hidden] on the CPU, contiguous
    scale: Floats | None = None  # [hidden]
    bias: Floats | None = None  # [experts]
    function: str = "none"
    correction: Floats | None = None  # [experts]

    def scores(self, inputs: Inputs) -> Floats:
        """Compute a router's scores of all experts from hidden states.

        [tokens, hidden] -> [tokens, experts]. The experts with the highest scores are chosen.
        """
        return self.finish(self.product(inputs))

    def product(self, inputs: Inputs) -> Floats:
        """Compute weight @ (scale * x) from hidden states x.

        [tokens, hidden] -> [tokens, experts].
        """
        x = inputs if self.scale is None else inputs * self.scale
        return self._product(np.ascontiguousarray(x, np.float32))

    def finish(self, out: Floats) -> Floats:
        """Compute scores from the product with the weight, which may be overwritten."""
        if self.bias is not None:
            out += self.bias
        if (f := FUNCTIONS[self.function]) is not None:
            out = f(torch.from_numpy(out)).numpy()
        return out if self.correction is None else out + self.correction

    def _product(self, x: Floats) -> Floats:
        weight = self.weight
        experts = weight.shape[0]
        if len(x) > MOST_GEMV_TOKENS or weight.dtype not in _COMPILED or missing_reason():
            product = torch.from_numpy(x).to(weight.dtype) @ weight.T
            result: Floats = product.float().numpy()
            return result
        out = np.empty((len(x), experts), np.float32)
        template, _ = self._template
        call = type(template).from_buffer_copy(template)
        call.rows, call.wide, call.sums = len(x), _address(x), _address(out)
        kernel_entry("linear", weight.dtype)(addressof(call), False)
        return out

    @cached_property
    def _template(self) -> tuple[Any, Any]:
        """The kernel's call with the fields of every product, and the matrix that it points to."""
        matrix = library().structure("Matrix")(base=self.weight.data_ptr())
        experts, hidden = self.weight.shape
        call = library().structure("LinearCall")(
            matrix=addressof(matrix), outputs=experts, inputs=hidden
        )
        return call, matrix


def _address(x: Floats) -> int:
    """Return the address of an array's data, faster than `x.ctypes.data`.

    That attribute takes longer than the matrix product of a router.
    """
    return torch.from_numpy(x).data_ptr() if x.flags.writeable else x.ctypes.data


_FORMULAS: dict[Hashable, int] = {}  # by kind of router with one tensor: the formula's number


@torch.no_grad()
def find_linear(router: Router) -> Linear | None:
    """Find a linear formula of a router's scores by trials with random inputs.

    Returns None if no formula chooses the same experts as the router for 99 % of the inputs. The
    next routers of a kind with one tensor, where formulas cannot be mistaken for each other, are
    tried with the same formula on a few inputs: a model has one in each layer.
    """
    try:
        kind = _kind(router)
        number = _find_formula(router, _FORMULAS.get(kind))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None  # its arguments or its result have another form
    if number is None:
        return None
    form = list(_forms(router))[number]  # the same formula, with the router's own tensors
    if form.scale is form.bias is form.correction is None and len(kind[-1]) == 1:
        _FORMULAS[kind] = number
    form.scores(random_inputs(form.weight.shape[1])[:1])  # compile it now, not at the first token
    return form


def _kind(router: Router) -> tuple[Any, ...]:
    """What routers with the same function of their tensors have in common."""
    module, plain = router.module, (bool, int, float, str)
    values = tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain))
    shapes = tuple((name, tensor.shape) for name, tensor in _tensors(router).items())
    return type(module), type(module).forward, router.experts, values, shapes


def _find_formula(router: Router, previous: int | None) -> int | None:
    """Return the number in `_forms` of the formula that fits a router; None if none does.

    `previous` is the number that fits another router of this kind.
    """
    exact = _exact(router)
    forms = list(_forms(exact))
    if not forms:
        return None
    x = random_inputs(forms[0].weight.shape[1])
    if previous is not None:
        chosen = exact(torch.from_numpy(x[:FEW_ROWS]))[1].numpy()
        if _agreement(forms[previous].scores(x[:FEW_ROWS]), chosen) == 1:
            return previous
    chosen = exact(torch.from_numpy(x))[1].numpy()
    products: dict[tuple[int, int], Floats] = {}  # by weight and scale: formulas share them
    agreed = []
    for form in forms:
        key = id(form.weight), id(form.scale)
        if key not in products:
            products[key] = form.product(x)
        agreed.append(_agreement(form.finish(products[key].copy()), chosen))
    best = int(np.argmax(agreed))
    return best if agreed[best] >= LEAST_AGREEMENT else None


def _exact(router: Router) -> Router:
    """Copy a router to float32: its scores then have no ties, so they distinguish formulas."""
    module = _copy_without_hooks(router.module)
    block: Any = nn.Module()
    for name, tensor in router.arguments().items():
        setattr(block, name, tensor.detach().cpu().float())
    return replace(router, module=module, block=block)


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """Copy a module to float32 on the CPU, without hooks, whose state must not be copied."""
    duplicate = copy(module)
    state = {name: {} if name.endswith("_hooks") else v for name, v in vars(module).items()}
    state.pop("forward", None)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: tensor if tensor is None else _plain(tensor)
            for name, tensor in state[kind].items()
        }
    state["_modules"] = {
        name: inner if inner is None else _copy_without_hooks(inner)
        for name, inner in state["_modules"].items()
    }
    duplicate.__dict__ = state
    return duplicate


def _plain(tensor: Tensor) -> Tensor:
    values = tensor.detach().cpu()
    return values.float() if values.is_floating_point() else values


def _forms(router: Router) -> Iterator[Linear]:
    """Yield every linear formula that a router's tensors allow, the simplest first."""
    floats = [t.detach().cpu() for t in _tensors(router).values() if t.is_floating_point()]
    for weight in floats:
        if weight.dim() != 2 or weight.shape[0] < router.experts or weight.shape[1] == 1:
            continue
        hidden = weight.shape[1]
        matrix = weight[: router.experts].contiguous()
        scales = [None, *(_floats(v) for v in floats if v.shape == (hidden,))]
        vectors = [None, *(_floats(v) for v in floats if v.numel() == router.experts)]
        for function in FUNCTIONS:
            for scale in scales:
                for bias in vectors:
                    for correction in [None] if function == "none" else vectors:
                        if correction is None or correction is not bias:
                            yield Linear(matrix, scale, bias, function, correction)


def _tensors(router: Router) -> dict[str, Tensor]:
    """Return all tensors that a router's scores may depend on, by name."""
    module = router.module
    return dict(module.named_parameters()) | dict(module.named_buffers()) | router.arguments()


def _floats(vector: Tensor) -> Floats:
    values: Floats = vector.reshape(-1).float().numpy().copy()
    return values


@lru_cache(maxsize=1)
def random_inputs(hidden: int) -> Inputs:
    """Make reproducible random hidden states [256, hidden] for trials of a router.

    The rows have three scales. Callers must not change the array. Drawing it takes as long as the
    trials of one router, so the last one is stored for the next router.
    """
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, hidden)).astype(np.float32)
    x *= np.resize(np.array(_SCALES, np.float32), ROWS)[:, None]
    return x


def _agreement(scores: Floats, chosen: NDArray[np.int64]) -> float:
    """Return the share of rows in which exactly the chosen experts have the highest scores."""
    picked = np.zeros(scores.shape, bool)
    np.put_along_axis(picked, chosen, True, axis=1)
    lowest = np.where(picked, scores, np.inf).min(axis=1)
    return float((lowest > np.where(picked, -np.inf, scores).max(axis=1)).mean())
