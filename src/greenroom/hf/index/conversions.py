"""Which checkpoint tensor becomes which parameter, by transformers' own rules.

No table per architecture: the renamings and conversions are those that `from_pretrained` applies.
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
    """The tensors that make one parameter, or several where a tensor is split.

    `sources` maps a converter's source pattern to its tensors' names in natural order: for experts
    stored one by one that is the order of the experts. Without a converter there is one tensor.
    """

    targets: tuple[str, ...]
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def operations(self) -> list[ConversionOps]:
        """What is done to the tensors; nothing where there is no converter."""
        return self.converter.operations if self.converter else []

    def convert(self, tensors: Mapping[str, Tensor], model: Any, config: Any) -> dict[str, Tensor]:
        """The parameters that tensors make, both by name; some of a pattern's may be left out."""
        first = self.targets[0]
        if self.converter is None:
            return {first: next(iter(tensors.values()))}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                if name in tensors:
                    converter.add_tensor(first, name, pattern, tensors[name])
        made = converter.convert(first, model=model, config=config)
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


def find_conversions(
    model: PreTrainedModel, names: Iterable[str], mapping: Sequence[WeightTransform] | None = None
) -> tuple[dict[str, WeightConversion], list[str]]:
    """(routes by their first parameter, tensors that the model has no parameter for).

    The model may be on the meta device, but must still have all of its parameters. `mapping`:
    other renamings and conversions than the model's own.
    """
    mapping, adapter = mapping or weight_transforms(model), adapter_of(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    derived = model.state_dict()
    prefix = model.base_model_prefix
    conversions: dict[str, WeightConversion] = {}
    unused: list[str] = []
    for name in sorted(names, key=dot_natural_key):
        if adapter is not None and adapter.is_unused(name, model):
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, derived)
        if target not in derived and name in derived:
            target, pattern = rename_source_key(name, [], [], prefix, derived)
        if target not in derived:
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
    """The dtype in which each parameter will be, as transformers decides it on loading.

    A parameter keeps the dtype that it was constructed in, except those of a `dtype_plan`
    (`_keep_in_fp32_modules`).
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
