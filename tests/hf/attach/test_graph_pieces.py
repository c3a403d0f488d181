"""One token in pieces, a graph for each layer: the bits, counts and decisions of kernels; errors.

The CPU stands in the GPU's place, as in `test_graph_pass`.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from greenroom.errors import DeviceError, StoreError
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.token_graph import TokenGraph
from tests.hf.attach.graphs import (
    PROMPT,
    TOKENS,
    counted,
    observed,
    pieced,
    placed_lru,
    prompt,
    replayed,
    tokens_of,
)
from tests.hf.attach.test_device_decode import check_table
from tests.hf.memory.test_device import ids, placed
from tests.recorded_graphs import RecordedGraphs

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]


@pytest.mark.parametrize(
    ("name", "host_capacity"),
    [
        *(("qwen3_moe", capacity) for capacity in (0, 6, 1000)),
        ("gpt_oss", 0),
        ("deepseek_v3", 1000),
    ],
)
def test_pieces_have_the_bits_and_decisions_of_kernels(name, host_capacity, monkeypatch):
    served, found = pieced(monkeypatch), list[Any]()
    for refused in (False, True):
        with (
            placed_lru(name, monkeypatch, 6, host_capacity=host_capacity) as model,
            torch.inference_mode(),
        ):
            cache = prompt(model)
            tokens_of(model, cache, 1)  # pieces are compared with it
            graph = model.greenroom.bindings._graph
            graph._refused = refused
            tokens_of(model, cache, 8)  # both caches have the same experts behind these
            model.greenroom.reset_stats()
            served.clear()
            seen = observed(graph._bindings)
            logits = tokens_of(model, cache, TOKENS)
            assert [layer for layer, _ in seen] == [*range(len(graph._bindings))] * TOKENS
            assert served == ([] if refused else [len(model.greenroom.bindings.modules)] * TOKENS)
            stats, driver = model.greenroom.stats(), model.greenroom.driver
            check_table(driver)
            counts = (
                stats.passes, stats.expert_requests, stats.expert_hits,
                driver.miss_counts.tolist(), driver.scheduler.residents().tolist(),
                [link["bytes"] for link in stats.links], seen,
            )  # fmt: skip
            found.append((logits, [layer.keys.clone() for layer in cache.layers], counts))
            assert stats.expert_hits < stats.expert_requests
    (*ours, counts), (*theirs, own_counts) = found
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
    assert counts == own_counts


def test_a_read_that_fails_between_pieces_ends_that_token_alone(monkeypatch):
    served = pieced(monkeypatch)
    with (
        placed_lru("qwen3_moe", monkeypatch, 4) as model,
        torch.inference_mode(),
    ):
        cache = prompt(model)
        tokens_of(model, cache, 2)
        expected = tokens_of(model, copy.deepcopy(cache), 3)
        store = model.greenroom.driver._copier._store

        def fail(*_: Any) -> None:
            raise StoreError("Input/output error")

        with monkeypatch.context() as failing:
            failing.setattr(store, "read", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                tokens_of(model, cache, 3)
        served.clear()
        before = cache.layers[0].get_seq_length() - PROMPT - 2
        got = tokens_of(model, cache, 3)
        assert len(served) == 3
        assert before or all(map(torch.equal, got, expected))
        check_table(model.greenroom.driver)


def answers_of(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[torch.Tensor]:
    """The logits of tokens, of which the first ones' comparisons cannot read an expert."""
    compute, failed = PieceGraph.compute, list[int]()
    with placed_lru("qwen3_moe", monkeypatch, 3) as model, torch.inference_mode():
        store = model.greenroom.driver._copier._store

        def fail(*_: Any) -> None:
            raise StoreError("Input/output error")

        def failing(self: PieceGraph, decode: Any) -> Any:
            with monkeypatch.context() as patch:
                if len(failed) < failures:
                    failed.append(1)
                    patch.setattr(store, "read", fail)
                return compute(self, decode)

        with monkeypatch.context() as patch:
            patch.setattr(PieceGraph, "compute", failing)
            logits = tokens_of(model, prompt(model), 6)
        check_table(model.greenroom.driver)
    assert len(failed) == failures
    return logits


def test_a_read_that_fails_in_a_comparison_ends_no_token(monkeypatch):
    """The token was computed before by the decoder's own forward; the next one is compared."""
    served = pieced(monkeypatch)
    expected = answers_of(monkeypatch, 0)
    before = len(served)
    assert all(map(torch.equal, answers_of(monkeypatch, 2), expected))
    assert len(served) == 2 * before - 2


def test_padding_is_computed_without_pieces(monkeypatch):
    served = pieced(monkeypatch)
    answers = []
    for refused in (False, True):
        with (
            placed_lru("qwen3_moe", monkeypatch, 4) as model,
            torch.inference_mode(),
        ):
            model.greenroom.bindings._graph._refused = refused
            mask = torch.ones(1, PROMPT, dtype=torch.int64)
            mask[0, :2] = 0
            cache = model(ids(1, PROMPT), attention_mask=mask, use_cache=True).past_key_values
            logits = []
            for n, token in enumerate(ids(4, 1)):
                mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
                if n == 2:  # a graph is there from here on
                    tokens_of(model, prompt(model), 2)
                    served.clear()
                out = model(token[None], attention_mask=mask, past_key_values=cache, use_cache=True)
                logits.append(out.logits)
            assert served == []  # they ended at the first layer
            answers.append(logits)
    assert all(map(torch.equal, *answers))


def test_a_token_is_in_pieces_while_prefetching_is_off(monkeypatch):
    """The predictor observes then, and predicts in other passes; bits and counts do not change."""
    served, found = pieced(monkeypatch), list[Any]()
    for refused in (False, True):
        with (
            placed("qwen3_moe", monkeypatch, kernels="triton", capacity=6, host_capacity=1000,
                   prefetch="next-gate") as model,
            torch.inference_mode(),
        ):  # fmt: skip
            predictions = model.greenroom.driver.predictions
            observed, predicted = list[Any](), list[bool]()
            foresight = predictions.foresight
            observe, predict = foresight.predictor.observe, foresight.predictor.predict

            def noted(routing: Any, observe: Any = observe, observed: Any = observed) -> None:
                observed.append((routing.layer, routing.experts.tolist()))
                observe(routing)

            def seen(layer: int, predict: Any = predict, predicted: Any = predicted) -> Any:
                predicted.append(True)
                return predict(layer)

            monkeypatch.setattr(foresight.predictor, "observe", noted)
            monkeypatch.setattr(foresight.predictor, "predict", seen)
            cache = prompt(model)
            model.greenroom.bindings._graph._refused = refused
            assert not predictions.guard.on  # until its first trial
            tokens_of(model, cache, 3)
            predictions.drain()
            assert (served != [], predicted) == (not refused, [])
            monkeypatch.setattr(predictions.guard, "passed", lambda *_: None)
            logits, counts, stats = [], [], []
            for on in (True, False, True):
                predictions.guard.on = on
                logits += tokens_of(model, cache, 1)  # its end hears of the decision
                for each in (served, observed, predicted):
                    each.clear()
                model.greenroom.reset_stats()
                logits += tokens_of(model, cache, 2)
                predictions.drain()
                counts.append((len(observed), bool(predicted)))
                assert len(served) == (0 if refused or on else 2)
                if not on:
                    stats.append(model.greenroom.stats().expert_requests)
                    stats.append([*observed])
            check_table(model.greenroom.driver)
            found.append((logits, counts, stats))
    (logits, *counts), (own_logits, *own_counts) = found
    assert all(map(torch.equal, logits, own_logits))
    assert counts == own_counts
    layers = len(model.greenroom.bindings.modules)
    assert counts[0] == [(2 * layers, True), (2 * layers, False), (2 * layers, True)]


def test_a_cache_that_grows_and_shrinks_has_both_kinds_of_graphs(monkeypatch):
    served, replays = pieced(monkeypatch), counted(monkeypatch)
    with placed_lru("qwen3_moe", monkeypatch, 1000) as model, torch.inference_mode():
        cache = prompt(model)
        replayed(model, cache, replays)
        stride = model.greenroom.setup.catalog.slot_bytes
        model.greenroom.resize(5 * stride)
        tokens_of(model, cache, 3)
        assert len(served) == 3  # of the comparison, and of two tokens
        model.greenroom.resize(1000 * stride)
        replays.clear()
        replayed(model, cache, replays)
        threads = model.greenroom.bindings._graph._threads
        assert threads.pieces is not threads.graph is not None


class Streams(RecordedGraphs):
    """Graphs of a device whose threads may launch on several streams; `orders` between these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.current, self.orders = "one", list[tuple[str, str]]()

    def current_stream(self) -> str:
        return self.current

    def order(self, before: str, after: str) -> None:
        self.orders.append((before, after))


def test_a_token_on_another_stream_is_set_behind_the_one_before(monkeypatch):
    """The graph may still read the id, the position and the addresses of the token before."""
    engine, ordered = Streams(monkeypatch), list[Any]()
    with (
        placed_lru("qwen3_moe", monkeypatch, 6, engine) as model,
        torch.inference_mode(),
    ):
        tokens_of(model, prompt(model), 4)
        cache = prompt(model)
        tokens_of(model, cache, 1)  # makes room for further ones, as no graph does
        for name in ("set_cache", "set_inputs"):
            set_one = getattr(TokenGraph, name)

            def watched(self: TokenGraph, *arguments: Any, set_one: Any = set_one) -> None:
                ordered.append(list(engine.orders))
                set_one(self, *arguments)

            monkeypatch.setattr(TokenGraph, name, watched)
        engine.current = "two"
        tokens_of(model, cache, 1)
        assert ordered == [[("one", "two")]] * 2


@pytest.mark.parametrize("capacity", [6, 1000])
def test_slots_change_their_stream_under_the_lock_of_steps(capacity, monkeypatch):
    """Else another thread's step launches what reads slots on a stream that nobody follows."""
    follow, owners = SlotTable.follow_stream, list[bool]()
    with placed_lru("qwen3_moe", monkeypatch, capacity) as model, torch.inference_mode():
        lock = model.greenroom.driver.step_lock

        def followed(table: SlotTable) -> None:
            owners.append(lock._owner == threading.get_ident())
            follow(table)

        monkeypatch.setattr(SlotTable, "follow_stream", followed)
        tokens_of(model, prompt(model), 4)
    assert owners
    assert all(owners)


def test_a_gpu_without_memory_for_a_graph_computes_without(monkeypatch, caplog):
    """The token was computed already; neither it nor a later one is an error."""
    logits, calls = list[Any](), list[str]()
    allocator, driver = "CUDA out of memory.", "CUDA error: out of memory\nmore"
    full: dict[str, Exception] = {
        "__init__": torch.OutOfMemoryError(allocator),
        "compute": torch.OutOfMemoryError(allocator),
        "replay": RuntimeError(driver),
    }

    def refuse(at: str, *_: Any, **__: Any) -> Any:
        calls.append(at)
        raise full[at]

    for at in (None, *full):
        caplog.clear()
        with (
            placed_lru("qwen3_moe", monkeypatch, 6) as model,
            torch.inference_mode(),
            monkeypatch.context() as patch,
            caplog.at_level(logging.WARNING),
        ):
            if at is not None:
                patch.setattr(PieceGraph, at, functools.partial(refuse, at))
            cache = prompt(model)
            logits.append(tokens_of(model, cache, 3))
            assert model.greenroom.bindings._graph._refused == (at is not None)
            assert cache.layers[0].get_seq_length() == PROMPT + 3
            problem = "single tokens are no graph: the GPU has no room for the graph"
            assert (problem in caplog.text) == (at is not None)
    assert all(all(map(torch.equal, logits[0], each)) for each in logits)
    assert calls == [*full]


def test_errors_of_a_graph_are_the_device_s(monkeypatch):
    """As those of kernels are: they say what to do, and servers know them."""
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        cache = prompt(model)
        tokens_of(model, cache, 2)
        pieces = model.greenroom.bindings._graph._threads.pieces

        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

        pieces._pieces[1] = fail
        with pytest.raises(DeviceError, match="the GPU failed: CUDA error: an illegal memory"):
            tokens_of(model, cache, 1)
