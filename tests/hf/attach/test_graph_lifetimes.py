"""Graphs of a token go when weights are replaced, a comparison fails, or a model is detached."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from greenroom.errors import StoreError
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.kernels.triton.token_launches import TokenLaunches
from tests.hf.attach.graphs import (
    counted,
    placed_lru,
    prompt,
    tokens_of,
)
from tests.hf.memory.test_device import ids

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]


def test_a_graph_follows_weights_that_are_replaced(monkeypatch):
    """At the next request; a graph reads the memory that weights had when it was captured."""
    logits = []
    for refused in (False, True):
        with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
            graph, found, made = model.greenroom.bindings._graph, list[Any](), list[Any]()
            graph._refused = refused
            for replaced in (False, True, False):
                if replaced:
                    weight = model.model.layers[0].self_attn.q_proj.weight
                    weight.data = weight.data * 1.5
                cache = prompt(model)
                found += tokens_of(model, cache, 2)  # the second one can be a graph
                assert graph._refused == refused
                assert (graph._threads.pieces is None) == refused
                made.append(graph._threads.pieces)
            assert len({*map(id, made)}) == (1 if refused else 2)
            logits.append(found)
    assert all(map(torch.equal, *logits))


@pytest.mark.parametrize("capacity", [6, 1000])
def test_a_graph_follows_weights_that_are_replaced_between_two_turns(capacity, monkeypatch):
    """A turn goes on with its KV cache; its prompt has several tokens."""
    logits, replays = list[Any](), counted(monkeypatch)
    for refused in (False, True):
        with placed_lru("qwen3_moe", monkeypatch, capacity) as model, torch.inference_mode():
            cache, graph = prompt(model), model.greenroom.bindings._graph
            if capacity == 1000 and not refused:
                model(ids(1, 60), use_cache=True)  # of all experts
            graph._refused = refused
            tokens_of(model, cache, 3)
            assert refused or graph._graph is not None
            norm = model.model.norm
            with torch.inference_mode(False):
                norm.weight = torch.nn.Parameter(norm.weight * 2, requires_grad=False)
            model(ids(1, 4), past_key_values=cache, use_cache=True)
            replays.clear()
            logits.append(tokens_of(model, cache, 3))
            assert refused or graph._graph is not None
    assert all(map(torch.equal, *logits))


def test_weights_are_checked_where_a_turn_may_begin(monkeypatch):
    """Not by each pass that verifies drafts: a check takes a millisecond."""
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache, checks = prompt(model), list[int]()
        monkeypatch.setattr(model.greenroom.hooks, "check_weights", lambda: checks.append(tokens))
        for tokens in (1, 4, 3, 1, 2, 20, 5):
            model(ids(1, tokens), past_key_values=cache, use_cache=True)
        assert checks == [4, 2, 20]


def test_no_graph_is_kept_of_weights_that_are_replaced_while_it_is_compared(monkeypatch):
    """By another thread's request: later ones would take it for a graph of the new weights."""
    replay = PieceGraph.replay
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        bindings, weight = model.greenroom.bindings, model.model.layers[0].self_attn.q_proj.weight

        def replace(self: PieceGraph, decode: Any) -> Any:
            hidden = replay(self, decode)
            weight.data = weight.data * 1.5
            bindings.check_weights()
            return hidden

        with monkeypatch.context() as patch:
            patch.setattr(PieceGraph, "replay", replace)
            tokens_of(model, prompt(model), 2)  # the second one can be a graph
        assert bindings._graph._threads.pieces is None
        tokens_of(model, prompt(model), 2)
        assert bindings._graph._threads.pieces is not None


def test_weights_that_are_replaced_while_a_first_token_is_computed_refuse_no_graph(monkeypatch):
    """Its result is that of the old weights, and the graph's of the new ones."""
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        graph, weight = model.greenroom.bindings._graph, model.model.norm.weight
        original, calls = graph._original, list[int]()

        def replace(**kwargs: Any) -> Any:
            out = original(**kwargs)
            calls.append(1)
            if len(calls) == 1:
                weight.data = weight.data * 1.5
            return out

        cache = prompt(model)
        tokens_of(model, cache, 1)  # the next one can be a graph
        monkeypatch.setattr(graph, "_original", replace)
        tokens_of(model, cache, 3)
        assert len(calls) == 3  # nothing was compared
        tokens_of(model, prompt(model), 2)
        assert graph._threads.pieces is not None


def test_another_thread_may_drop_graphs_beside_a_token(monkeypatch):
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache, bindings = prompt(model), model.greenroom.bindings
        tokens_of(model, cache, 2)
        expected = tokens_of(model, copy.deepcopy(cache), 1)
        read, weight = bindings._graph._read_call, model.model.layers[0].self_attn.q_proj.weight

        def replace(kwargs: dict[str, Any]) -> Any:
            token = read(kwargs)
            weight.data = weight.data.clone()
            thread = threading.Thread(target=bindings.check_weights)
            thread.start()
            thread.join()
            return token

        pieces = bindings._graph._threads.pieces
        assert pieces is not None
        with monkeypatch.context() as patch:
            patch.setattr(bindings._graph, "_read_call", replace)
            assert torch.equal(*tokens_of(model, cache, 1), *expected)
        assert pieces._pieces  # this thread was launching them
        tokens_of(model, cache, 1)
        assert not pieces._pieces
        assert bindings._graph._threads.pieces is not pieces


def test_a_graph_that_is_kept_beside_another_thread_s_request_is_dropped(monkeypatch):
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        bindings, weight = model.greenroom.bindings, model.model.layers[0].self_attn.q_proj.weight
        agrees, kept = bindings._graph._agrees, list[Any]()

        def replace(graph: Any, *arguments: Any) -> bool:
            agreed = agrees(graph, *arguments)
            weight.data = weight.data * 1.5
            bindings.check_weights()  # as another thread does
            kept.append(graph)
            return agreed

        cache = prompt(model)
        tokens_of(model, cache, 1)
        with monkeypatch.context() as patch:
            patch.setattr(bindings._graph, "_agrees", replace)
            tokens_of(model, cache, 1)
        assert bindings._graph._threads.pieces is kept[0]
        tokens_of(model, cache, 1)
        assert bindings._graph._threads.pieces is not kept[0]
        assert not kept[0]._pieces


def test_an_interrupted_token_keeps_no_pieces_of_old_weights(monkeypatch):
    """Its traceback has the graph while the next one is captured."""

    def stop(*_: Any) -> None:
        raise Stop

    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache, graph = prompt(model), model.greenroom.bindings._graph
        tokens_of(model, cache, 2)
        pieces = graph._threads.pieces
        with monkeypatch.context() as patch:
            patch.setattr(PieceGraph, "_serve_layer", stop)
            with pytest.raises(Stop) as stopped:
                tokens_of(model, cache, 1)
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data * 1.5
        capture = PieceGraph._capture_pieces

        def captured(self: PieceGraph, decode: Any) -> Any:
            assert not pieces._pieces
            return capture(self, decode)

        monkeypatch.setattr(PieceGraph, "_capture_pieces", captured)
        tokens_of(model, prompt(model), 2)
        assert graph._threads.pieces not in (None, pieces)
        assert stopped.value is not None


class Stop(BaseException):
    pass


def note_graphs(made: list[Any], patch: pytest.MonkeyPatch) -> None:
    """Add each new graph in pieces to a list."""
    init = PieceGraph.__init__

    def note(self: PieceGraph, *arguments: Any, **parts: Any) -> None:
        init(self, *arguments, **parts)
        made.append(self)

    patch.setattr(PieceGraph, "__init__", note)


def test_an_interrupt_of_second_captures_keeps_no_pieces(monkeypatch):
    made = list[Any]()

    def stop(launches: Any) -> None:
        assert made[0]._pieces
        raise Stop

    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache = prompt(model)
        with monkeypatch.context() as patch:
            note_graphs(made, patch)
            patch.setattr(TokenLaunches, "capture_again", stop)
            with pytest.raises(Stop):
                tokens_of(model, cache, 2)
        assert not made[0]._pieces


@pytest.mark.parametrize("error", [StoreError("Input/output error"), KeyboardInterrupt()])
def test_what_was_captured_goes_with_a_comparison_that_fails(error, monkeypatch):
    """Its memory may have the workspace of later graphs, and a traceback would keep it."""
    made, replay = list[Any](), PieceGraph.replay

    def fail(self: PieceGraph, decode: Any) -> Any:
        replay(self, decode)
        assert self._pieces
        raise error

    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache = prompt(model)
        with monkeypatch.context() as patch:
            note_graphs(made, patch)
            patch.setattr(PieceGraph, "replay", fail)
            with contextlib.suppress(KeyboardInterrupt):
                tokens_of(model, cache, 2)
        assert made
        assert not any(each._pieces for each in made)


def test_a_model_that_is_detached_has_no_graph(monkeypatch):
    """Its memory would stay until Python's collector finds it."""
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        tokens_of(model, prompt(model), 2)
        pieces = weakref.ref(model.greenroom.bindings._graph._threads.pieces)
        assert pieces() is not None
    assert pieces() is None
