"""Redirection of routers' choices to the stored experts of each token's variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from greenroom.hf.variants.catalog import ExpertVariants, Ids
from greenroom.runtime.cuda.ids import to_host

MODEL: Ids = np.zeros(1, np.int64)  # the variant of all tokens: the model itself


class VariantRouting:
    """Redirects each token of a forward pass to the experts of its variant.

    `rows` has the variant of each token of the present pass; a single one is that of all tokens.
    """

    def __init__(self, variants: ExpertVariants) -> None:
        self.variants, self.rows = variants, MODEL

    def use(self, rows: Sequence[int]) -> None:
        """Set the variant of each token of the next forward passes.

        `rows` is in the order of the tokens. Without tokens, the next passes are those of the model
        itself.
        """
        array = np.array(rows or MODEL, np.int64)
        self.rows = array[:1] if (array == array[0]).all() else array

    def stored(self, layer: int, chosen: Ids) -> Ids:
        """Return the stored experts for a router's choices [tokens, top_k].

        Numbers beyond the layer's experts, which are left out, become numbers beyond its stored
        experts. RuntimeError if the choices are not those of all tokens of the pass.
        """
        table = self.variants.stored[layer]
        if len(self.rows) == 1:
            ids: Ids = table[self.rows[0]].take(chosen, mode="clip")
            return ids
        if len(chosen) != len(self.rows):
            raise RuntimeError(
                f"layer {layer} computes {len(chosen)} tokens in a pass of {len(self.rows)}"
            )
        last = table.shape[1] - 1
        mixed: Ids = table[self.rows[:, None], np.minimum(chosen, last)]
        return mixed

    def read_choice(self, layer: int, index: Tensor, weights: Tensor | None) -> tuple[Ids, Any]:
        """Copy a layer's choices and gate weights to the host, as `to_host` does, redirected."""
        chosen, on_host = to_host(index, weights)
        return self.stored(layer, chosen), on_host
