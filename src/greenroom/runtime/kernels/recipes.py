"""Detect an experts class's arithmetic by comparison with its eager forward.

A few transformers classes sum over experts in float32, or compute in float32 throughout. No flag
says so, and a table of class names would miss the next class. So the class's forward runs once on a
toy model of a few experts, and the first recipe that gives the same bits is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from greenroom.core.layout import SlotLayout, TensorSpec
from greenroom.errors import UnsupportedModel
from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.routing import Routing

if TYPE_CHECKING:
    from greenroom.runtime.kernels.layer import LayerExperts

_EXPERTS, _TOKENS, _TOP_K, _INNER = 5, 7, 3, 16

Make = Callable[..., "LayerExperts"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The data types in which an experts class computes its products and sums.

    compute:    type of the matrix products and of all operations between them; None: the model's
    accumulate: type of the sum over a token's experts; None: the model's; "weights": the type of
                the gate weights
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype | str | None = None

    def sum_dtype(self, x: Tensor, weights: Tensor) -> torch.dtype:
        """Return the type in which expert outputs are summed, given input and gate weights."""
        if self.accumulate == "weights":
            return weights.dtype
        return x.dtype if self.accumulate is None else self.accumulate  # type: ignore[return-value]


# In the order tried.
RECIPES = (
    Recipe(),
    Recipe(accumulate="weights"),
    Recipe(accumulate=torch.float32),
    Recipe(compute=torch.float32, accumulate=torch.float32),
)


class _Toy:
    """A toy experts module: small weights, everything else from the real module."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.__dict__.update(tensors, num_experts=_EXPERTS, _module=module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_module"], name)


def _tensors(module: nn.Module, dtype: torch.dtype, hidden: int) -> dict[str, Tensor]:
    """Draw random parameters [E, ...] that fit the module's flags."""
    random = torch.Generator().manual_seed(0)
    pairs = 2 if module.has_gate else 1
    up = (pairs * _INNER, hidden)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    shapes: dict[str, tuple[int, ...]] = {name: up, "down_proj": (hidden, _INNER)}
    if module.is_transposed:
        shapes = {key: shape[::-1] for key, shape in shapes.items()}
    if module.has_bias:
        shapes |= {f"{name}_bias": up[:1], "down_proj_bias": (hidden,)}
    return {
        key: torch.randn(_EXPERTS, *shape, generator=random).div(3).to(dtype)
        for key, shape in shapes.items()
    }


_CACHE: dict[tuple[type[nn.Module], torch.dtype], Recipe] = {}


def find_recipe(module: nn.Module, dtype: torch.dtype, make: Make) -> Recipe:
    """Find the data types that reproduce the bits of an experts class's own eager forward.

    A class that has no eager forward, or that computes an expert's output itself, gets the default
    recipe. The result is cached per class and `dtype`. `make` is `LayerExperts`, passed because its
    module imports this one. Raises UnsupportedModel if no recipe gives the same bits.
    """
    key = type(module), dtype
    if key not in _CACHE:
        _CACHE[key] = _find(module, dtype, make)
    return _CACHE[key]


def _find(module: nn.Module, dtype: torch.dtype, make: Make) -> Recipe:
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None or getattr(module, "own_arithmetic", False):
        return Recipe()
    hidden, device = _INNER, torch.device("cpu")
    if module.has_post_expert_norm:  # the real module's norm, so the toy is on its device
        norm = next(module.post_expert_norm.parameters())  # type: ignore[union-attr]
        hidden, device = norm.shape[-1], norm.device
    tensors = {name: t.to(device) for name, t in _tensors(module, dtype, hidden).items()}
    toy = _Toy(module, tensors)
    layout = SlotLayout.pack(
        [(k, tuple(t.shape[1:]), str(dtype)[6:]) for k, t in tensors.items() if t.dim() == 3]
    )

    def tensor(slot: int, spec: TensorSpec) -> Tensor:
        return tensors[spec.name][slot]

    slots = SimpleNamespace(base=0, stride=0, tensor=tensor)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(_TOKENS, hidden, generator=random).to(device, dtype)
    scores = torch.rand(_TOKENS, _EXPERTS, generator=random).to(device)
    index = scores.topk(_TOP_K).indices
    weights = scores.gather(1, index)
    cases = [weights, weights.to(dtype)]
    with torch.no_grad():
        expected = [eager(toy, x, index, w) for w in cases]
        for recipe in RECIPES:
            layer = make(toy, layout, slots, recipe)
            if all(
                torch.equal(_run(layer, x, index, w), want)
                for w, want in zip(cases, expected, strict=True)
            ):
                return recipe
    raise UnsupportedModel(
        f"{type(module).__name__}: no expert kernel of Greenroom reproduces the bits of this"
        " class's forward; `greenroom models` lists the architectures that run"
    )


def _run(layer: LayerExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    routing = Routing.of(index.cpu().numpy(), _EXPERTS)
    step = EagerKernel().begin(layer, x, routing, weights)
    experts = routing.experts.tolist()
    step.compute_group(experts, experts)
    return step.combine()
