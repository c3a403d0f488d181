"""Index the experts of a model, alone, with an adapter, or with variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from greenroom.config import LoadConfig
from greenroom.config.values import parse_adapters
from greenroom.core.layout import Catalog
from greenroom.errors import UnsupportedModel, UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.index.catalog import make_catalog
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.experts import StreamedParameter
from greenroom.hf.variants.adapter import with_adapter
from greenroom.hf.variants.catalog import ExpertVariants, join_catalogs


class Adapters(NamedTuple):
    """Adapters of a model: their folders, and whether the model itself is served beside them.

    Without `as_variants` there is one adapter at most, and its experts replace the model's.
    """

    folders: tuple[str, ...] = ()
    as_variants: bool = False


NO_ADAPTERS = Adapters()


def adapters_of(config: LoadConfig, as_variants: bool = False) -> Adapters:
    """Return the adapters that a run's `--adapter` names.

    UsageError if there are several, and the model cannot have `as_variants`.
    """
    named = parse_adapters(config.adapter)
    if len(named) > 1 and not as_variants:
        raise UsageError(
            "--adapter: this command takes one adapter; `greenroom serve` and `greenroom batch`"
            " take several"
        )
    return Adapters(tuple(each.path for each in named), as_variants)


def index_experts(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    layers: list[list[StreamedParameter]],
    adapters: Adapters = NO_ADAPTERS,
) -> tuple[Checkpoint, Catalog, ExpertVariants | None]:
    """Make the catalog of a model's experts, with those that adapters change.

    The other arguments are those of `make_catalog`. Returns the checkpoint that was indexed, whose
    files include the adapters'; the catalog; and the variants, if the model is one of several.
    """
    catalog = make_catalog(model, checkpoint, conversions, layers)
    if not adapters.folders:
        return checkpoint, catalog, None
    modules = [model.get_submodule(layer[0].module) for layer in layers]
    if adapters.as_variants and any(getattr(each, "own_arithmetic", False) for each in modules):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served with adapters beside it: its class computes"
            " experts itself"
        )
    order = [spec.name for spec in catalog.layouts[0].tensors]
    experts = _expert_tensors(conversions, layers)
    catalogs = [catalog]
    for folder in adapters.folders:
        changed = with_adapter(checkpoint, Path(folder).expanduser(), experts)
        catalogs.append(make_catalog(model, changed, conversions, layers, order))
        if not adapters.as_variants:
            return changed, catalogs[1], None
        checkpoint = replace(checkpoint, files=changed.files)
    return checkpoint, *join_catalogs(catalogs)


def _expert_tensors(
    conversions: dict[str, WeightConversion], layers: Sequence[list[StreamedParameter]]
) -> list[str]:
    """Return the names of the checkpoint's tensors of all experts that stay on disk."""
    streamed = {each.full_name for layer in layers for each in layer}
    return [
        name
        for conversion in conversions.values()
        if streamed.intersection(conversion.targets)
        for names in conversion.sources.values()
        for name in names
    ]
