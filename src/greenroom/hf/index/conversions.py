"""Find the checkpoint tensors of each model parameter, by transformers' weight conversions.

Greenroom has no table for each architecture: the renamings and conversions are those that
transformers' `from_pretrained` uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from greenroom.hf.adapters import adapter_of, weight_transforms


@dataclass
class WeightConversion:
    """Conversion of checkpoint tensors to one or several model parameters.

    targets:   the parameters' full names
    converter: transformers' converter; None if a single tensor is only renamed
    sources:   the names of the checkpoint tensors, by the converter's source pattern; they are in
               natural order, so tensors of single experts are in the order of experts
    """

    targets: tuple[str, ...]
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def operations(self) -> list[ConversionOps]:
        """The operations of a weight conversion; empty if a tensor is only renamed."""
        return self.converter.operations if self.converter else []

    def convert(self, tensors: Mapping[str, Tensor], model: Any, config: Any) -> dict[str, Tensor]:
        """Convert checkpoint tensors, given by name, to model parameters by full name.

        The tensors may be those of some experts only.
        """
        first = self.targets[0]
        if self.converter is None:
            return {first: next(iter(tensors.values()))}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                if name in tensors:
                    converter.add_tensor(first, name, pattern, tensors[name])
        parameters = converter.convert(first, model=model, config=config)
        return {name: v[0] if isinstance(v, list) else v for name, v in parameters.items()}


def find_conversions(
    model: PreTrainedModel, names: Iterable[str], mapping: Sequence[WeightTransform] | None = None
) -> tuple[dict[str, WeightConversion], list[str]]:
    """Find the weight conversions for a model's parameters, and unused checkpoint tensors.

    Returns (conversions by the full name of their first parameter, names of unused tensors). The
    model may be on the meta device, but must still have all of its parameters. `names` are those of
    the checkpoint's tensors; `mapping` replaces transformers' weight transforms of this model.
    """
    mapping, adapter = mapping or weight_transforms(model), adapter_of(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    parameters = model.state_dict()
    prefix = model.base_model_prefix
    conversions: dict[str, WeightConversion] = {}
    unused: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        if adapter is not None and adapter.is_unused(name, model):
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = rename_source_key(name, [], [], prefix, parameters)
        if target not in parameters:
            unused.append(name)
            continue
        if target not in conversions:
            converter = by_pattern[pattern] if pattern is not None else None
            conversions[target] = WeightConversion(_targets(target, converter), converter)
        conversions[target].sources.setdefault(pattern or name, []).append(name)
    return conversions, unused


def _targets(first: str, converter: WeightConverter | None) -> tuple[str, ...]:
    if converter is None:
        return (first,)
    patterns = converter.target_patterns
    return tuple(first.replace(patterns[0], pattern) for pattern in patterns)


class TargetDtypes:
    """Function from a parameter's name to the dtype in which transformers loads it.

    A parameter keeps the dtype in which it was constructed, unless its name matches a pattern of
    the plan (transformers' `dtype_plan`, from `_keep_in_fp32_modules`).
    """

    def __init__(self, plan: Mapping[str, torch.dtype]) -> None:
        self._plan = plan
        if plan:
            self._pattern, self._groups, _ = build_glob_alternation(list(plan))

    def __call__(self, name: str, constructed: torch.dtype) -> torch.dtype:
        match = self._pattern.search(name) if self._plan else None
        if match is None or match.lastgroup is None:
            return constructed
        return self._plan[self._groups[match.lastgroup]]
