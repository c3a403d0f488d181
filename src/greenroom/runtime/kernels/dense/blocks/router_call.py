"""Kernel calls of one choice of some tokens' experts (router.py)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from greenroom.runtime.kernels.launch import sequence

if TYPE_CHECKING:
    from greenroom.runtime.kernels.dense.blocks.router import CompiledRouter


class RouterCall:
    """One choice of some tokens' experts: the kernel calls that compute it, and its result.

    Run the kernel calls in `stages`, then call `result`.
    """

    __slots__ = ("_products", "_router", "choices", "ids", "stages", "weights")

    def __init__(self, router: CompiledRouter, x: int, tokens: int = 1) -> None:
        """Make the kernel calls that choose experts for hidden states [tokens, H] at address x."""
        self._router = router
        self.ids = torch.empty(tokens, router.top_k, dtype=torch.int64)
        self.weights = torch.empty(tokens, router.top_k, dtype=router.dtype)
        self._products = router.memory_of(tokens)()  # faster than torch.empty
        product = router.copy_product(router.product)
        logits = ctypes.addressof(self._products)
        setattr(product, "sums" if router.in_float32 else "out", logits)
        product.x, product.rows = x, tokens
        results = (logits, self.ids.data_ptr(), self.weights.data_ptr())
        self.choices = [router.choice_of(token, *results) for token in range(tokens)]
        self.stages: tuple[sequence.Stage, ...] = (
            (router.multiply, product),
            (router.select, self.choices[0])
            if tokens == 1
            else sequence.batch_stage(router.select_rows, self.choices),
        )

    @property
    def is_chosen(self) -> bool:
        """Check that the kernel has chosen the experts, rather than leave a choice to torch."""
        return all(choice.chosen for choice in self.choices)

    def result(self, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the chosen expert ids and their gate weights, both [tokens, top_k].

        tokens: of how many tokens; the default is all

        If the kernel could not choose, torch's operations choose from the router's logits.
        """
        for token, choice in enumerate(self.choices[:tokens]):
            if not choice.chosen:
                self._choose_by_torch(token)
        return self.ids[:tokens], self.weights[:tokens]

    def choose_by_torch(self) -> tuple[Tensor, Tensor]:
        """Choose experts from the router's logits by torch's operations: (ids, gate weights)."""
        for token in range(len(self.choices)):
            self._choose_by_torch(token)
        return self.ids, self.weights

    def _choose_by_torch(self, token: int) -> None:
        row = slice(token, token + 1)
        self.ids[row], self.weights[row] = self._router.choose_by_torch(self.products[row])

    @property
    def chosen_addresses(self) -> list[int]:
        """Return the address of each token's int64 that is 0 if torch must choose."""
        offset = type(self.choices[0]).chosen.offset
        return [ctypes.addressof(choice) + offset for choice in self.choices]

    @property
    def products(self) -> Tensor:
        """Return the router's logits [tokens, experts], in `CompiledRouter.logits`."""
        flat = torch.frombuffer(self._products, dtype=self._router.logits)
        return flat.view(len(self.choices), -1)
