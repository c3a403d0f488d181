"""Catalog of the experts of a model and of its adapters; equal experts are stored once.

ExpertWeave (arXiv 2508.17624) keeps the changed experts of several adapters beside the model's own,
and redirects each token to those of its adapter. Here a changed expert is one more expert of its
layer, so that cache, policies, slots and kernels need not know of adapters. The stored experts of a
layer are in the order of the model's experts, each followed by its changed forms. So the outputs of
a token's experts are summed in the order in which the model alone sums them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenroom.core.layout import Catalog, Extent
from greenroom.errors import UnsupportedModel

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExpertVariants:
    """Tables from the experts of each variant of a model to stored experts.

    Variant 0 is the model itself; the others are its adapters, in order.

    stored:    for each layer, the id within the layer of the stored expert that a variant has as an
               expert, [variants, experts + 1]; the last column stands for experts that are left out
    originals: for each layer, the number of the model's expert that a stored expert is or replaces,
               [stored experts + 1]; the last one stands for experts that are left out
    """

    stored: tuple[Ids, ...]
    originals: tuple[Ids, ...]

    @property
    def count(self) -> int:
        """Count the variants, with the model itself."""
        return len(self.stored[0])

    def experts_in(self, layer: int) -> int:
        """Count a layer's stored experts, of all variants."""
        return len(self.originals[layer]) - 1

    def changed(self, variant: int) -> list[tuple[int, int]]:
        """List the experts that a variant has changed, as (layer, number of the expert)."""
        return [
            (layer, int(e))
            for layer, table in enumerate(self.stored)
            for e in np.flatnonzero(table[variant, :-1] != table[0, :-1])
        ]

    @property
    def digest(self) -> str:
        """Return a digest of which experts are changed, in 16 hexadecimal digits."""
        parts = [table.tobytes() for table in self.stored]
        return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()

    def of_model(self, catalog: Catalog) -> Catalog:
        """Return a catalog with the numbers of experts of the model alone, for its routers."""
        counts = [table.shape[1] - 1 for table in self.stored]
        return replace(catalog, offsets=(0, *accumulate(counts)))


def join_catalogs(catalogs: Sequence[Catalog]) -> tuple[Catalog, ExpertVariants]:
    """Join the catalogs of a model and of its adapters; equal experts are stored once.

    catalogs: of the model, and of each of its variants; they have the same files. Raises
              UnsupportedModel if an adapter's experts are stored in another layout.
    """
    base, *others = catalogs
    if any(other.layouts != base.layouts for other in others):
        raise UnsupportedModel(
            "--adapter: the adapter's experts have another layout in memory than the model's"
        )
    extents: list[list[tuple[Extent, ...]]] = []
    stored: list[Ids] = []
    originals: list[Ids] = []
    for layer, count in enumerate(base.experts_per_layer):
        experts: list[tuple[Extent, ...]] = []
        numbers: list[int] = []
        table = np.empty((len(catalogs), count + 1), np.int64)
        for e in range(count):
            extents_of_model = base.locate(layer, e)
            table[:, e] = len(experts)
            experts.append(extents_of_model)
            numbers.append(e)
            for variant, other in enumerate(others, 1):
                if (changed := other.locate(layer, e)) != extents_of_model:
                    table[variant, e] = len(experts)
                    experts.append(changed)
                    numbers.append(e)
        table[:, count] = len(experts)
        extents.append(experts)
        stored.append(table)
        originals.append(np.array([*numbers, count], np.int64))
    joined = replace(
        base,
        files=max((catalog.files for catalog in catalogs), key=len),
        offsets=(0, *accumulate(map(len, extents))),
        locate=lambda layer, expert: extents[layer][expert],
    )
    return joined, ExpertVariants(tuple(stored), tuple(originals))
