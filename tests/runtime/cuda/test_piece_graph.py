"""A token's graph in pieces: the order of its launches; stubs take the place of the experts'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.piece_graph import Padded, PieceGraph
from greenroom.runtime.cuda.token_graph import NoGraph

LAYERS = 2


class Graphs(Engine):
    """A device whose graphs say which piece of a pass they are, and launch nothing."""

    makes_graphs = True

    def __init__(self, did: list[str]) -> None:
        self.did, self.works = did, True

    def capture_in_pieces(
        self, work: Callable[[Callable[[], None]], None]
    ) -> list[Callable[[], None]] | None:
        if not self.works:
            return None
        self.did.append("capture")
        cuts = []
        work(lambda: cuts.append(self.did.append("cut")))
        names = [f"piece {n}" for n in range(len(cuts) + 1)]
        return [lambda name=name: self.did.append(name) for name in names]  # type: ignore


class Launches:
    """A layer's launches, which say what they do."""

    def __init__(self, layer: int, did: list[str]) -> None:
        self._layer, self._did = layer, did

    def _say(self, what: str) -> None:
        self._did.append(f"{what} {self._layer}")

    def run(self, x: Tensor, *_: Any) -> Tensor:
        self._say("capture of")
        return x

    def start_kernels(self, x: Tensor, *_: Any) -> Tensor:
        self._say("kernels of")
        return x

    def start_piece(self, piece: Callable[[], None]) -> Tensor:
        piece()
        return torch.zeros(1)

    def launch_piece(self, piece: Callable[[], None]) -> None:
        self._say("behind loads, to")
        piece()

    def capture_again(self) -> None:
        self._say("second look-up of")

    def read_report(self) -> None:
        self._say("report of")

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        yield


class Rig:
    def __init__(self, engine: type[Engine] = Graphs) -> None:
        self.did, self.launching, self.misses = list[str](), False, set[int]()
        self.engine: Any = engine(self.did) if engine is Graphs else engine()
        parts = self.engine, LAYERS, LAYERS, 2, 8, torch.zeros(1, 1, 4), None
        self.graph = PieceGraph(*parts, launch=self.launch, serve=self.serve)

    def launch(self, start: Callable[..., Tensor], *arguments: Any) -> Tensor:
        assert not self.launching
        self.launching = True
        try:
            return start(*arguments)
        finally:
            self.launching = False

    def serve(self, layer: int, launches: Any, then: Callable[[], None] | None) -> None:
        assert not self.launching  # it may wait for other threads
        self.did.append(f"serve {layer}")
        if layer in self.misses and then is not None:
            then()

    def decode(self) -> Tensor:
        x = torch.ones(1, 4)
        for layer in range(LAYERS):
            make = lambda _, layer=layer: Launches(layer, self.did)  # noqa: E731
            x = self.graph.launch_experts(layer, make, x, x, x)
        return x[None]

    def take(self) -> list[str]:
        did, self.did[:] = [*self.did], []
        return did


def test_layers_are_served_between_pieces():
    rig = Rig()
    assert rig.graph.compute(rig.decode).tolist() == [[[1, 1, 1, 1]]]
    assert rig.take() == ["kernels of 0", "serve 0", "kernels of 1", "serve 1"]
    rig.graph.replay(rig.decode)
    assert rig.take() == [
        "capture", "capture of 0", "cut", "capture of 1", "cut",
        "second look-up of 0", "second look-up of 1",
        "piece 0", "serve 0", "piece 1", "serve 1", "piece 2",
    ]  # fmt: skip
    rig.graph.replay(rig.decode)
    assert rig.take() == ["piece 0", "serve 0", "piece 1", "serve 1", "piece 2"]


@pytest.mark.parametrize(
    ("misses", "expected"),
    [
        ({0}, ["piece 0", "serve 0", "behind loads, to 1", "piece 1", "serve 1", "piece 2"]),
        ({1}, ["piece 0", "serve 0", "piece 1", "serve 1", "piece 2"]),  # the last layer
    ],
)
def test_a_piece_may_follow_at_once_what_the_layer_before_has_missed(misses, expected):
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.graph.replay(rig.decode)
    rig.take()
    rig.misses = misses
    for _ in range(2):
        rig.graph.replay(rig.decode)
        assert rig.take() == expected


def test_a_pass_that_failed_behind_a_piece_begins_anew():
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.graph.replay(rig.decode)
    rig.misses, serve = {0}, rig.serve

    def fail(layer: int, *arguments: Any) -> None:
        serve(layer, *arguments)
        if layer:
            raise KeyboardInterrupt

    rig.graph._serve = fail
    with pytest.raises(KeyboardInterrupt):
        rig.graph.replay(rig.decode)
    rig.graph._serve = rig.serve
    rig.take()
    rig.graph.replay(rig.decode)
    assert rig.take() == [
        "piece 0", "serve 0", "behind loads, to 1", "piece 1", "serve 1", "piece 2",
    ]  # fmt: skip


def test_a_device_without_graphs_launches_kernels():
    rig = Rig(Engine)
    rig.graph.compute(rig.decode)
    rig.take()
    for _ in range(2):
        rig.graph.replay(rig.decode)
        assert rig.take() == ["kernels of 0", "serve 0", "kernels of 1", "serve 1"]


def test_a_pass_that_cannot_be_captured_is_no_graph():
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.engine.works = False
    with pytest.raises(NoGraph, match="could not be captured"):
        rig.graph.replay(rig.decode)


def test_a_capture_that_ends_early_is_not_taken_for_one_later():
    rig = Rig()
    rig.graph.compute(rig.decode)
    rig.take()

    def interrupt() -> Tensor:
        rig.decode()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.graph.replay(interrupt)
    rig.take()
    rig.graph.compute(rig.decode)
    assert rig.take()[0] == "kernels of 0"


def test_padding_ends_the_pass_at_its_first_layer():
    rig, one = Rig(), torch.ones(1, 1, dtype=torch.int64)
    for replay in (rig.graph.compute, rig.graph.replay, rig.graph.replay):
        rig.graph.set_inputs(one, None, torch.tensor([[0, 1]]), 1)
        rig.take()
        if replay == rig.graph.compute:  # makes the launches of the first layer alone
            with pytest.raises(Padded):
                replay(rig.decode)
            rig.graph.set_inputs(one, None, torch.tensor([[1, 1]]), 1)
            replay(rig.decode)
            continue
        with pytest.raises(Padded):
            replay(rig.decode)
        assert rig.take()[-2:] == ["piece 0", "report of 0"]
    rig.graph.set_inputs(one, None, torch.tensor([[1, 1]]), 1)
    rig.graph.replay(rig.decode)
    assert rig.take() == ["piece 0", "report of 0", "serve 0", "piece 1", "serve 1", "piece 2"]
