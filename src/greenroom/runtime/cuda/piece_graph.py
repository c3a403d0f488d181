"""One token's pass through a decoder as graphs that end behind each MoE layer's products.

Between two of them the host reads which experts the layer misses, and launches their copies and
products. All else of the pass, attention and norms and routers, is in the graphs: so the host
launches one graph a layer, in place of some thirty kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from greenroom.runtime.cuda.token_graph import MakeLaunches, NoGraph, TokenGraph

Launch = Callable[..., Tensor]  # calls a function that launches work, with arguments
Serve = Callable[[int, Any], None]  # (layer, its launches), behind the layer's look-up


class Padded(Exception):
    """The mask of a token has padding, which graphs do not know."""


class PieceGraph(TokenGraph):
    """The pass of one token: a graph for each MoE layer, and one behind them.

    Without CUDA's graphs the pieces are the decoder's own kernels, one by one.
    """

    def __init__(self, *arguments: Any, launch: Launch, serve: Serve) -> None:
        """Allocate what the pass reads and writes.

        arguments: those of `TokenGraph`
        launch:    calls a function that launches a piece, while no slot is resized
        serve:     launches what a layer misses; not within `launch`
        """
        super().__init__(*arguments)
        self._launch, self._serve = launch, serve
        self._pieces: list[Callable[[], None]] | None = None
        self._cut: Callable[[], None] | None = None  # ends a piece that is being captured

    def launch_experts(
        self, layer: int, make: MakeLaunches, x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        launches = self._launches_of(layer, make)
        if self._cut is not None:
            captured: Tensor = launches.run(x, index, weights)
            self._cut()
            return captured
        result = self._launch(launches.start_kernels, x, index, weights)
        self._serve_layer(layer, launches)
        return result

    def compute(self, decode: Callable[[], Tensor]) -> Tensor:
        self._run(decode)
        return self._launch(self._hidden.clone)

    def replay(self, decode: Callable[[], Tensor]) -> Tensor:
        """Launch the pieces, captured from `decode` at the first call, and what layers miss.

        `compute` was called before, so that all kernels are compiled. Returns a copy of the result.
        Raises NoGraph if the pieces cannot be captured; Padded, and the errors of `serve`.
        """
        if self._pieces is None:
            self._pieces = self._capture_pieces(decode)
        if not self._pieces:
            return self.compute(decode)
        *pieces, last = self._pieces
        for layer, piece in zip(self.moe_layers, pieces, strict=True):
            launches = self._launches[layer]
            self._launch(launches.start_piece, piece)
            self._serve_layer(layer, launches)
        return self._launch(self._end, last)

    def _end(self, piece: Callable[[], None]) -> Tensor:
        with self._in_order():
            piece()
            return self._hidden.clone()

    def _serve_layer(self, layer: int, launches: Any) -> None:
        if self._has_mask and layer == self.moe_layers[0]:
            launches.read_report()
            if not self.mask_is_full:
                raise Padded("a mask of padding")
        self._serve(layer, launches)

    def _capture_pieces(self, decode: Callable[[], Tensor]) -> list[Callable[[], None]]:
        """Capture the pieces; the result is empty on a device without graphs."""

        def work(cut: Callable[[], None]) -> None:
            self._cut = cut
            try:
                self._run(decode)
            finally:
                self._cut = None

        with self._in_order():  # the table's lock first, then that of captures
            pieces = self._engine.capture_in_pieces(work)
        if pieces is None:
            if self._engine.makes_graphs:
                raise NoGraph("the pass could not be captured")
            return []
        for launches in self._launches.values():
            launches.capture_again()
        return pieces
