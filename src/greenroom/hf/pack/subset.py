"""The choice of the experts that a pack has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from greenroom.core.layout import Catalog
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.pack.header_file import read
from greenroom.hf.checkpoint.pack.reading import is_pack
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.subset import ExpertSubset


class Keep(NamedTuple):
    """A choice of the experts that a pack has.

    choose:    makes the subset from the catalog of the model's experts
    arguments: of `greenroom pack`, with which an unfinished pack is continued
    """

    choose: Callable[[Catalog], ExpertSubset]
    arguments: tuple[str, ...] = ()


def packed_skeleton(
    checkpoint: Checkpoint, keep: Keep | None, repaired: Path | None
) -> ModelSkeleton:
    """Build the model of a pack: with the experts that `keep` chooses, or with all.

    repaired: the folder of a pack to repair, which keeps the experts that it has; else None
    """
    skeleton, subset = ModelSkeleton.of(checkpoint), None
    if repaired is not None:
        subset = ExpertSubset.of_header(read(repaired)) if is_pack(repaired) else None
    elif keep is not None:
        subset = keep.choose(skeleton.catalog)
    return skeleton if subset is None else ModelSkeleton.of(checkpoint, only=subset)
