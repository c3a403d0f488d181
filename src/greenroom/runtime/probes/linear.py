"""Routers that are one matrix: found by trying, and asked by one compiled product.

Nearly all routers rank by f(W x + b) + c with a monotone f, and some scale x before. Which of a
router's tensors is which, and what f is, is found by what it answers to random inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from greenroom.core.predictor import Inputs
from greenroom.runtime.kernels.codegen.entries import layers
from greenroom.runtime.kernels.launch.openmp import kernel_entry
from greenroom.runtime.probes.routers import Router

Floats = NDArray[np.float32]
ROWS = 256  # random inputs
AGREE = 0.99  # of them; the rest may be ties
FEW = 4  # tokens that are multiplied one by one
_COMPILED = {torch.bfloat16, torch.float16, torch.float32}
_SCALES = (0.3, 1.0, 3.0)  # of random inputs: a sigmoid is nearly linear, or nearly a step


FUNCTIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=1),
    "root of softplus": lambda x: softplus(x).sqrt(),
}


@dataclass(frozen=True, slots=True)
class Linear:
    """scores(x) = f(W (scale * x) + bias) + correction; `weight` is the router's own memory."""

    weight: Tensor  # [E, H] on the CPU, contiguous
    scale: Floats | None = None  # [H]
    bias: Floats | None = None  # [E]
    function: str = "none"
    correction: Floats | None = None  # [E]

    def scores(self, inputs: Inputs) -> Floats:
        """[T, H] -> [T, E]: higher is likelier."""
        x = inputs if self.scale is None else inputs * self.scale
        out = self._product(np.ascontiguousarray(x, np.float32))
        if self.bias is not None:
            out += self.bias
        if (f := FUNCTIONS[self.function]) is not None:
            out = f(torch.from_numpy(out)).numpy()
        return out if self.correction is None else out + self.correction

    def _product(self, x: Floats) -> Floats:
        weight = self.weight
        experts, hidden = weight.shape
        if len(x) > FEW or weight.dtype not in _COMPILED:
            product = torch.from_numpy(x).to(weight.dtype) @ weight.T
            result: Floats = product.float().numpy()
            return result
        out = torch.empty((len(x), experts), dtype=torch.float32)
        words = array("q", [0] * (layers.OUT_WIDE + 1))
        words[layers.W : layers.W_COLUMNS + 1] = array("q", (weight.data_ptr(), experts, hidden))
        words[layers.X_ROWS] = len(x)
        words[layers.X_WIDE], words[layers.OUT_WIDE] = _address(x), out.data_ptr()
        kernel_entry(layers.gemv, weight.dtype, False)(words.buffer_info()[0], False)
        scored: Floats = out.numpy()
        return scored


def _address(x: Floats) -> int:
    """Where an array lies; NumPy's own way to say it takes longer than the product of a layer."""
    return torch.from_numpy(x).data_ptr() if x.flags.writeable else x.ctypes.data


@torch.no_grad()
def find_linear(router: Router) -> Linear | None:
    """What a router computes, if it is linear; None where no such formula gives its answers."""
    try:
        exact = _exact(router)
        forms = list(_forms(exact))
        if not forms:
            return None
        x = random_inputs(forms[0].weight.shape[1])
        _, chosen = exact(torch.from_numpy(x))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None  # it wants something other than hidden states, or gives something else
    agreed = [_agreement(form.scores(x), chosen.numpy()) for form in forms]
    best = int(np.argmax(agreed))
    if agreed[best] < AGREE:
        return None
    form = list(_forms(router))[best]  # the same one, of the router's own tensors
    form.scores(x[:1])  # compiled now, so that the first token does not wait for that
    return form


def _exact(router: Router) -> Router:
    """A copy in float32: its answers have no ties, so they tell formulas apart."""
    module = _bare(router.module)
    block: Any = nn.Module()
    for name, tensor in router.arguments().items():
        setattr(block, name, tensor.detach().cpu().float())
    return replace(router, module=module, block=block)


def _bare(module: nn.Module) -> nn.Module:
    """A copy in float32 on the CPU. Hooks stay behind: what they hold must not be copied."""
    made = copy(module)
    state = {name: {} if name.endswith("_hooks") else v for name, v in vars(module).items()}
    state.pop("forward", None)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: tensor if tensor is None else _plain(tensor)
            for name, tensor in state[kind].items()
        }
    state["_modules"] = {
        name: inner if inner is None else _bare(inner) for name, inner in state["_modules"].items()
    }
    made.__dict__ = state
    return made


def _plain(tensor: Tensor) -> Tensor:
    values = tensor.detach().cpu()
    return values.float() if values.is_floating_point() else values


def _forms(router: Router) -> Iterator[Linear]:
    """Every formula that the router's tensors could make, the simplest first."""
    tensors = {**dict(router.module.named_parameters()), **dict(router.module.named_buffers())}
    tensors |= router.arguments()
    own = [tensor.detach().cpu() for tensor in tensors.values() if tensor.is_floating_point()]
    for weight in own:
        if weight.dim() != 2 or weight.shape[0] < router.experts or weight.shape[1] == 1:
            continue
        hidden = weight.shape[1]
        matrix = weight[: router.experts].contiguous()
        scales = [None, *(_floats(v) for v in own if v.shape == (hidden,))]
        vectors = [None, *(_floats(v) for v in own if v.numel() == router.experts)]
        for function in FUNCTIONS:
            for scale in scales:
                for bias in vectors:
                    for correction in [None] if function == "none" else vectors:
                        if correction is None or correction is not bias:
                            yield Linear(matrix, scale, bias, function, correction)


def _floats(vector: Tensor) -> Floats:
    values: Floats = vector.reshape(-1).float().numpy().copy()
    return values


def random_inputs(hidden: int) -> Inputs:
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, hidden)).astype(np.float32)
    x *= np.resize(np.array(_SCALES, np.float32), ROWS)[:, None]
    return x


def _agreement(scores: Floats, chosen: NDArray[np.int64]) -> float:
    """The share of rows in which exactly the chosen have the highest scores."""
    picked = np.zeros(scores.shape, bool)
    np.put_along_axis(picked, chosen, True, axis=1)
    lowest = np.where(picked, scores, np.inf).min(axis=1)
    return float((lowest > np.where(picked, -np.inf, scores).max(axis=1)).mean())
