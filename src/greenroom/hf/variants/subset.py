"""A model with a subset of its experts: routers choose among these experts alone.

A router loses its rows of the other experts. This equals a mask that sets their scores to minus
infinity before the softmax. All else works as for a smaller model: the cache has only experts of
the subset, and they are numbered from 0 in each layer. PreMoe and EASY-EP choose the experts of a
task in this way (docs/papers.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from greenroom.core.cache.pins import Pins
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Ints
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.pack.format import PackHeader
from greenroom.hf.index.experts import StreamedParameter
from greenroom.runtime.probes.routers import Router, find_routers
from greenroom.runtime.probes.softmax import SoftmaxFormula, find_formulas, with_random_weights
from greenroom.sim.pinned import best_experts, expert_scores
from greenroom.trace import Trace


@dataclass(frozen=True)
class ExpertSubset:
    """The experts of each layer that a model has, where it lacks some.

    layers:        names of the experts modules
    experts:       the experts' numbers in the complete model, ascending, by layer
    model_experts: the number of experts in the complete model, by layer
    """

    layers: tuple[str, ...]
    experts: tuple[tuple[int, ...], ...]
    model_experts: tuple[int, ...]

    @classmethod
    def of(cls, ids: Ints, catalog: Catalog) -> ExpertSubset:
        """Make a subset of a catalog's experts from their dense ids."""
        numbers = ids.tolist()
        experts = tuple(
            tuple(sorted(e - a for e in numbers if a <= e < b))
            for a, b in pairwise(catalog.offsets)
        )
        return cls(catalog.layers, experts, catalog.experts_per_layer)

    @classmethod
    def of_trace(cls, trace: Trace, share: float, score: str, catalog: Catalog) -> ExpertSubset:
        """Choose the experts of each layer that a recording's tokens need most.

        share, score: as for `sim.pinned.hot_experts`; all requests count

        UsageError if the recording is of another model, or lacks what the score needs.
        """
        if tuple(trace.offsets.tolist()) != tuple(catalog.offsets):
            raise UsageError("the recording is of a model with other numbers of experts or layers")
        scores = expert_scores(trace, score)
        return cls.of(best_experts(scores, catalog.offsets, share), catalog)

    @classmethod
    def of_header(cls, header: PackHeader) -> ExpertSubset | None:
        """Return the subset of experts that a pack has; None if it has all of its model."""
        if not header.layers[0].subset:
            return None
        return cls(
            tuple(layer.name for layer in header.layers),
            tuple(layer.subset for layer in header.layers),
            tuple(layer.model_experts for layer in header.layers),
        )

    @classmethod
    def load(cls, path: str | Path, catalog: Catalog) -> ExpertSubset:
        """Read a subset from a file of `greenroom trace hot` with one task.

        UsageError if the file cannot be read, is of another model or has several tasks.
        """
        pins = Pins.load(path, catalog.offsets)
        if len(pins.tasks) > 1:
            raise UsageError(
                f"{path} lists the experts of {len(pins.tasks)} tasks, but must list those of one:"
                " make a file with `greenroom trace hot --task NAME`"
            )
        return cls.of(pins.first, catalog)

    @property
    def count(self) -> int:
        """The number of experts in the subset, of all layers."""
        return sum(map(len, self.experts))

    @property
    def digest(self) -> str:
        """A digest of which experts are in the subset, in 16 hexadecimal digits."""
        return hashlib.blake2b(json.dumps(self.experts).encode(), digest_size=8).hexdigest()

    @property
    def description(self) -> str:
        """The subset's size in words, for the start-up line."""
        return f"only {self.count} of the model's {sum(self.model_experts)} experts"

    def check(self, model: PreTrainedModel, option: str) -> None:
        """Check that a model's routers can choose from the subset alone; UsageError otherwise.

        `option` names what asks for the subset.
        """
        formulas = find_formulas(model, self.layers, option)
        routers = find_routers(model, self.layers)
        checked: set[Any] = set()
        for layer, numbers in enumerate(self.experts):
            router, formula = routers[layer], formulas[layer]
            if len(numbers) < formula.top_k:
                raise UsageError(
                    f"{option}: a token uses {formula.top_k} experts of layer {layer}, and the"
                    f" subset has {len(numbers)}"
                )
            key = type(router.module), numbers
            if key not in checked and not _can_restrict(router, formula, numbers):
                raise UsageError(
                    f"{option}: {type(router.module).__name__} of {type(model).__name__} cannot"
                    " choose from a subset of experts"
                )
            checked.add(key)

    def reduce(
        self, catalog: Catalog, parameters: Sequence[list[StreamedParameter]]
    ) -> tuple[Catalog, list[list[StreamedParameter]]]:
        """Return the catalog and the streamed parameters of the subset alone."""
        smaller = replace(
            catalog,
            offsets=(0, *accumulate(map(len, self.experts))),
            locate=lambda layer, expert: catalog.locate(layer, self.experts[layer][expert]),
        )
        return smaller, self.reduce_parameters(parameters)

    def reduce_parameters(
        self, parameters: Sequence[list[StreamedParameter]]
    ) -> list[list[StreamedParameter]]:
        """Return the streamed parameters with the subset's number of experts in their shapes."""
        return [
            [replace(one, shape=(len(numbers), *one.shape[1:])) for one in layer]
            for layer, numbers in zip(parameters, self.experts, strict=True)
        ]

    def restrict(self, model: nn.Module) -> None:
        """Remove the other experts from a loaded model's routers, and from its experts' biases."""
        routers = find_routers(model, self.layers)
        for router, name, numbers in zip(routers, self.layers, self.experts, strict=True):
            for module in (router.module, model.get_submodule(name)):
                _select_rows(module, numbers, router.experts)


Only: TypeAlias = ExpertSubset | str | None


def check_subset(
    model: PreTrainedModel, checkpoint: Checkpoint, catalog: Catalog, only: ExpertSubset | str
) -> ExpertSubset:
    """Return the subset that a run or a pack asks for, after a check.

    `only` is the subset, or a file of `greenroom trace hot`. Raises UsageError if the model's
    routers cannot choose from the subset, or if the checkpoint is a pack.
    """
    option = "--only-experts" if isinstance(only, str) else "--keep"
    if checkpoint.pack is not None:
        raise UsageError(
            f"{option} needs the original of a pack: give {checkpoint.pack.header.source.model}"
        )
    subset = ExpertSubset.load(only, catalog) if isinstance(only, str) else only
    subset.check(model, option)
    return subset


def _select_rows(module: Any, numbers: Sequence[int], experts: int) -> None:
    """Select the rows of some experts in all tensors in which a module has a row an expert."""
    for table in (module._parameters, module._buffers):
        for name, value in table.items():
            if value is not None and value.dim() and value.shape[0] == experts:
                rows = value.detach()[list(numbers)].contiguous()
                table[name] = nn.Parameter(rows, False) if table is module._parameters else rows
    if getattr(module, "num_experts", None) == experts:
        module.num_experts = len(numbers)


@torch.no_grad()
def _can_restrict(router: Router, formula: SoftmaxFormula, numbers: Sequence[int]) -> bool:
    """Check with random weights that a router's scores do not depend on the other experts."""
    complete, smaller = (with_random_weights(router.module) for _ in range(2))
    _select_rows(smaller, numbers, router.experts)
    matrix = next(p for p in complete.parameters() if p.dim() == 2)
    x = torch.randn(8, matrix.shape[1], generator=torch.Generator().manual_seed(2)).to(matrix.dtype)
    try:
        first, last = (type(each).forward(each, x)[0] for each in (complete, smaller))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    scores = formula.scores(first)[:, list(numbers)].log_softmax(-1)
    return last.shape == scores.shape and torch.allclose(
        formula.scores(last).log_softmax(-1), scores, rtol=1e-2, atol=1e-2
    )
