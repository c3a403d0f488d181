"""Which arithmetic an experts class uses, found by trying: its own eager forward is the judge.

A few classes sum over experts in float32, or compute in float32 throughout. No flag says so, and
a table of names would miss the next one, so the class's forward runs once on a toy of two
experts, and the first recipe that gives the same bits is taken.
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
    """Where an experts class departs from the common arithmetic, which is all in one type.

    compute:    the type of the matrix products and of all between them; None: the model's
    accumulate: the type of the sum over a token's experts; None: the model's; "weights": that
                of the routing weights
    """

    compute: torch.dtype | None = None
    accumulate: torch.dtype | str | None = None

    def sum_dtype(self, x: Tensor, weights: Tensor) -> torch.dtype:
        """The type of the sum for these inputs."""
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
    """An experts module with small weights of its own and everything else of the real one."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.__dict__.update(tensors, num_experts=_EXPERTS, _module=module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_module"], name)


def _tensors(module: nn.Module, dtype: torch.dtype, hidden: int) -> dict[str, Tensor]:
    """Random parameters [E, ...] as the module's flags say."""
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


_KNOWN: dict[tuple[type[nn.Module], torch.dtype], Recipe] = {}


def recipe_of(module: nn.Module, dtype: torch.dtype, make: Make) -> Recipe:
    """The recipe that reproduces the class's own eager forward; the common one if it has none, or
    says by itself what an expert gives. `make` is LayerExperts."""
    key = type(module), dtype
    if key not in _KNOWN:
        _KNOWN[key] = _find(module, dtype, make)
    return _KNOWN[key]


def _find(module: nn.Module, dtype: torch.dtype, make: Make) -> Recipe:
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None or getattr(module, "own_arithmetic", False):
        return Recipe()
    hidden, device = _INNER, torch.device("cpu")
    if module.has_post_expert_norm:  # of the module itself, so the toy goes where that is
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
        wanted = [eager(toy, x, index, w) for w in cases]
        for recipe in RECIPES:
            layer = make(toy, layout, slots, recipe)
            if all(
                torch.equal(_run(layer, x, index, w), want)
                for w, want in zip(cases, wanted, strict=True)
            ):
                return recipe
    raise UnsupportedModel(
        f"{type(module).__name__} computes its experts in a way that Greenroom does not reproduce"
    )


def _run(layer: LayerExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    routing = Routing.of(index.cpu().numpy(), _EXPERTS)
    step = EagerKernel().begin(layer, x, routing, weights)
    experts = routing.experts.tolist()
    step.compute_group(experts, experts)
    return step.combine()
