"""One token's pass through a decoder as graphs that end behind each MoE layer's products.

Between two of them the host reads which experts the layer misses, and launches their copies and
products. All else of the pass, attention and norms and routers, is in the graphs: so the host
launches one graph a layer, in place of some thirty kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from greenroom.runtime.cuda.token_graph import MakeLaunches, NoGraph, TokenGraph

Launch = Callable[..., Any]  # calls a function that launches work, with arguments
Serve = Callable[[int, Any, Callable[[], None] | None], None]  # see `PieceGraph`


class Padded(Exception):
    """The mask of a token has padding, which graphs do not know."""


class PieceGraph(TokenGraph):
    """The pass of one token: a graph for each MoE layer, and one behind them.

    Without CUDA's graphs the pieces are the decoder's own kernels, one by one.
    """

    def __init__(self, *arguments: Any, launch: Launch, serve: Serve) -> None:
        """Allocate what the pass reads and writes.

        arguments: those of `TokenGraph`
        launch:    calls a function that launches work, while no other step is under way
        serve:     launches what a layer misses, behind its look-up: called with the layer, its
                   launches, and what it may launch behind these, the next piece; not in `launch`
        """
        super().__init__(*arguments)
        self._launch, self._serve = launch, serve
        self._pieces: list[Callable[[], None]] = []
        self._captured = False
        self._cut: Callable[[], None] | None = None  # ends a piece that is being captured
        self._launched = 0  # pieces of the present token

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
        if not self._captured:
            self._pieces, self._captured = self._launch(self._capture_pieces, decode), True
        if not self._pieces:
            return self.compute(decode)
        self._launched, last = 0, len(self.moe_layers) - 1
        for number, layer in enumerate(self.moe_layers):
            launches, piece = self._launches[layer], self._pieces[number]
            if self._launched == number:  # else behind what the layer before missed
                self._launch(launches.start_piece, piece)
                self._launched += 1
            self._serve_layer(layer, launches, self._launch_next if number < last else None)
        return self._launch(self._end, self._pieces[-1])

    def release(self) -> None:
        self._pieces.clear()

    def _launch_next(self) -> None:
        """Launch the next layer's piece, within what launches the work before it."""
        number = self._launched
        self._launches[self.moe_layers[number]].launch_piece(self._pieces[number])
        self._launched = number + 1

    def _end(self, piece: Callable[[], None]) -> Tensor:
        with self._in_order():
            piece()
            return self._hidden.clone()

    def _serve_layer(
        self, layer: int, launches: Any, then: Callable[[], None] | None = None
    ) -> None:
        if self._has_mask and layer == self.moe_layers[0]:
            launches.read_report()
            if not self.mask_is_full:
                raise Padded("a mask of padding")
        self._serve(layer, launches, then)

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
        self._pieces = pieces  # which an interrupt of what follows releases
        for launches in self._launches.values():
            launches.capture_again()
        return pieces


class ThreadGraphs(threading.local):
    """A thread's graphs of a decoder's pass.

    pieces:  its graph in pieces, for a cache that has not a slot for each expert
    version: of the weights that the graphs were made of
    missed:  an expert of the last pass without a graph was not in its slot yet
    """

    graph: TokenGraph | None = None
    pieces: PieceGraph | None = None
    version = 0
    missed = False

    def follow(self, version: int) -> None:
        """Drop the calling thread's graphs if they were made of other weights."""
        if self.version != version:
            for graph in (self.graph, self.pieces):
                if graph is not None:
                    graph.release()
            self.graph = self.pieces = None
            self.version = version

    def keep(self, graph: TokenGraph) -> None:
        """Take a graph for later tokens of the calling thread."""
        if isinstance(graph, PieceGraph):
            self.pieces = graph
        else:
            self.graph = graph
