"""One token as one graph: the bits and counts of a pass without it; what keeps it from being one.

The CPU stands in the GPU's place, where a graph is recorded operations (`tests.recorded_graphs`),
and Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

pytest.importorskip("triton")

from greenroom.errors import DeviceError, StoreError
from greenroom.hf.attach.graph_pass import GraphPass
from greenroom.hf.attach.token_attention import MARK, TokenAttention
from greenroom.hf.kv.batch import Batch, is_near
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.token_graph import TokenGraph
from greenroom.runtime.probes import GateInputProbe, Router
from tests.hf.attach.test_device_decode import check_table
from tests.hf.memory.test_device import ids, placed
from tests.models import cached_tiny, reference
from tests.recorded_graphs import RecordedGraphs
from tests.runtime.cuda.conftest import (
    _bfloat16_as_a_device_rounds_it,  # noqa: F401
    _products_whose_bits_depend_on_values_alone,  # noqa: F401
)

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the compiled ones"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
PROMPT, TOKENS = 5, 6
Answer = tuple[torch.Tensor, dict[str, Any], int]


def placed_lru(name: str, monkeypatch: Any, capacity: int, engine: Any = None, **parts: Any) -> Any:
    engine = engine or RecordedGraphs(monkeypatch)
    parts = {"kernels": "triton", "capacity": capacity, "policy": "lru", **parts}
    return placed(name, monkeypatch, engine, **parts)


def tokens_of(model: Any, cache: Any, count: int, **options: Any) -> list[torch.Tensor]:
    """The logits of tokens that follow what a KV cache has, one pass each."""
    return [
        model(token[None], past_key_values=cache, use_cache=True, **options).logits
        for token in ids(count, 1)
    ]


def prompt(model: Any, tokens: int = PROMPT) -> Any:
    return model(ids(1, tokens), use_cache=True).past_key_values


def replayed(model: Any, cache: Any, replays: list[int]) -> None:
    """Compute tokens until one of them is a graph, since nothing is missing any more."""
    for _ in range(20):
        if replays:
            return
        tokens_of(model, cache, 1)
    pytest.fail("no token was a graph")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of graphs' replays, one for each."""
    replays, replay = list[int](), TokenGraph.replay

    def counting(self: TokenGraph, decode: Any) -> Any:
        replays.append(self._number + 1)
        return replay(self, decode)

    monkeypatch.setattr(TokenGraph, "replay", counting)
    return replays


def test_no_slot_is_freed_while_the_first_graph_is_launched(monkeypatch):
    """Another thread may detach Greenroom from the model; its kernels would read freed memory."""
    locked = list[bool]()
    with placed_lru("qwen3_moe", monkeypatch, 1000) as model, torch.inference_mode():
        for launch in (TokenGraph.compute, TokenGraph.replay):

            def watched(self: TokenGraph, decode: Any, launch: Any = launch) -> Any:
                owner = model.greenroom.driver.step_lock._owner
                locked.append(owner == threading.get_ident())
                return launch(self, decode)

            monkeypatch.setattr(TokenGraph, launch.__name__, watched)
        tokens_of(model, prompt(model), 2)
    assert len(locked) >= 2
    assert all(locked)


# Graphs of these are tested in each run. The last one has latent attention; gpt-oss has sinks, and
# a window of 16 tokens in each second layer, the first one.
NAMES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]
OTHERS = [
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "granitemoe",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "longcat_flash", "minimax_m2",
    "minimax_m3_vl_text", "mistral4", "qwen2_moe",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_graph_has_the_bits_of_a_pass_that_loads_experts(name, monkeypatch):
    monkeypatch.setattr("greenroom.hf.kv.cache.BLOCK", 4)
    replays, answers = counted(monkeypatch), list[Any]()
    before = 13 if name == "gpt_oss" else PROMPT
    for capacity in (1000, 4):
        with (
            placed_lru(name, monkeypatch, capacity) as model,
            torch.inference_mode(),
        ):
            cache = prompt(model, before)
            logits = tokens_of(model, cache, TOKENS)
            keys = [layer.keys for layer in cache.layers]
            answers.append((logits, [each.clone() for each in keys]))
            assert keys[0].shape[2] == (15 if name == "gpt_oss" else before + TOKENS)
            assert {layer.get_seq_length() for layer in cache.layers} == {before + TOKENS}
            assert bool(replays) == (capacity == 1000)
            assert any(mark._is_near for mark in marks_of(model))
            replays.clear()
    for large, small in zip(*answers, strict=True):
        assert all(map(torch.equal, large, small))


def pieced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of times that each pass in pieces has served its layers."""
    served, replay = list[int](), PieceGraph.replay

    def counting(self: PieceGraph, decode: Any) -> Any:
        result = replay(self, decode)
        served.append(len(self.moe_layers))
        return result

    monkeypatch.setattr(PieceGraph, "replay", counting)
    return served


def observed(bindings: Any) -> list[tuple[int, list[int]]]:
    """The choices of routers that observers hear of from now on: (layer, experts)."""
    seen: list[tuple[int, list[int]]] = []

    def observe(layer: int, experts: Any) -> None:
        seen.append((layer, experts.tolist()))

    for binding in bindings:
        object.__setattr__(binding, "on_routing", observe)
    return seen


def test_observers_hear_of_an_interrupted_pass_before_the_next_one(monkeypatch):
    with placed_lru("qwen3_moe", monkeypatch, 1000) as model, torch.inference_mode():
        cache = prompt(model, 60)  # of all experts
        graph, norm = model.greenroom.bindings._graph, model.model.norm
        seen: list[Any] = observed(graph._bindings)

        class Passes:
            def on_pass(self, *_: Any) -> None:
                seen.append("pass")

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        model.greenroom.hooks.observers.append(Passes())
        hook = norm.register_forward_pre_hook(interrupt)  # behind all layers
        with pytest.raises(KeyboardInterrupt):
            tokens_of(model, cache, 1)
        hook.remove()
        assert model.greenroom.driver.deferred._steps
        prompt(model)
        layers = [*range(len(graph._bindings))]
        heard = [each if each == "pass" else each[0] for each in seen]
        assert heard == ["pass", *layers, "pass", *layers]


@pytest.mark.parametrize("host_capacity", [0, 6, 1000])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
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


def marks_of(model: Any) -> list[Any]:
    """The attention in place of the model's own, of each layer."""
    return [vars(module)[MARK] for module in model.modules() if MARK in vars(module)]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_single_tokens_are_near_those_of_transformers(name, monkeypatch):
    theirs = reference(cached_tiny(name, dtype="bfloat16"))
    with torch.inference_mode():
        cache = theirs(ids(1, 20), use_cache=True).past_key_values
        expected = tokens_of(theirs, cache, 3)
        with placed_lru(name, monkeypatch, 1000) as model:
            for ours, own in zip(tokens_of(model, prompt(model, 20), 3), expected, strict=True):
                assert is_near(ours, own, torch.bfloat16)


def test_attention_of_another_kind_keeps_its_place(monkeypatch, caplog):
    """The kernel's is compared with the module's own function, not with what it looks like."""
    from transformers.models.gpt_oss import modeling_gpt_oss as file

    own, calls = inspect.unwrap(file.eager_attention_forward), list[int]()

    @functools.wraps(own)
    def other(module: Any, *tensors: Any, scaling: float, **options: Any) -> Any:
        calls.append(tensors[0].shape[2])
        return own(module, *tensors, scaling=scaling / 9, **options)

    monkeypatch.setattr(file, "eager_attention_forward", other)
    with (
        placed_lru("gpt_oss", monkeypatch, 1000) as model,
        torch.inference_mode(),
        caplog.at_level(logging.INFO),
    ):
        cache = prompt(model, 13)
        calls.clear()
        tokens_of(model, cache, 2)
        assert calls.count(1) >= 2 * model.config.num_hidden_layers
        assert not any(mark._is_near for mark in marks_of(model))
        assert model.greenroom.bindings._graph._refused
    assert "single tokens are no graph: attention that the kernel does not comp" in caplog.text


def test_attention_to_other_tensors_than_stored_ones_is_no_graph(monkeypatch, caplog):
    with (
        placed_lru("jetmoe", monkeypatch, 1000) as model,
        torch.inference_mode(),
        caplog.at_level(logging.INFO),
    ):
        tokens_of(model, prompt(model), 2)
        assert model.greenroom.bindings._graph._refused
    assert "no graph: attention to other tensors than those that are stored" in caplog.text


def test_batches_of_latent_attention_have_the_bits_of_its_sequences(monkeypatch):
    with placed_lru("deepseek_v3", monkeypatch, 1000) as model, torch.inference_mode():
        tokens, attended = [[5], [7]], list[torch.Tensor]()
        marks, compute = marks_of(model), TokenAttention.compute

        def noted(self: TokenAttention, call: Any) -> Any:
            out = compute(self, call)
            if self is marks[0]:
                attended.append(out)
            return out

        monkeypatch.setattr(TokenAttention, "compute", noted)
        caches = [prompt(model, n) for n in (13, 6)]
        batch = Batch(model)
        assert batch.can_batch([1, 1])
        attended.clear()
        batch(tokens, [copy.deepcopy(each) for each in caches])
        for token, cache in zip(tokens, caches, strict=True):
            batch([token], [cache])
        assert len(attended) == 4
        assert all(map(torch.equal, attended[:2], attended[2:]))


def test_a_graph_counts_uses_as_a_pass_without_it_does(monkeypatch):
    counts = []
    for refused in (False, True):
        with (
            placed_lru("qwen3_moe", monkeypatch, 1000) as model,
            torch.inference_mode(),
        ):
            model.greenroom.bindings._graph._refused = refused
            seen = observed(model.greenroom.bindings._graph._bindings)
            replays = counted(monkeypatch)
            tokens_of(model, prompt(model), TOKENS)
            assert bool(replays) != refused
            driver = model.greenroom.driver
            driver.deferred.settle()
            stats = model.greenroom.stats()
            driver.resize(3)  # the order of use decides what stays
            stays = sorted(driver.scheduler.placement.cache.state.slot_of.nonzero()[0].tolist())
            counts.append(
                (seen, driver.request_counts.tolist(), driver.miss_counts.tolist(), stays,
                 stats.expert_requests, stats.expert_hits, stats.passes)
            )  # fmt: skip
    assert counts[0] == counts[1]


def test_a_missing_expert_is_loaded_by_a_pass_without_a_graph(monkeypatch):
    """Slots for all, but most experts were never read: random tokens miss some again and again."""
    replays, logits = counted(monkeypatch), []
    for capacity in (1000, 4):
        with (
            placed_lru("qwen3_moe", monkeypatch, capacity) as model,
            torch.inference_mode(),
        ):
            cache = model(ids(1, 1), use_cache=True).past_key_values
            logits.append(tokens_of(model, cache, 8))
            view = model.greenroom.driver.scheduler.view
            if capacity == 1000:
                passed = replays[-1] - 1
                assert passed > 0
                assert view.misses > 0
                assert not model.greenroom.bindings._graph._refused
    assert all(map(torch.equal, *logits))


def test_a_graph_follows_the_kv_cache(monkeypatch):
    """It grows, and another request has another one."""
    monkeypatch.setattr("greenroom.hf.kv.cache.BLOCK", 4)
    replays, logits = counted(monkeypatch), []
    for capacity in (1000, 4):
        with (
            placed_lru("qwen3_moe", monkeypatch, capacity) as model,
            torch.inference_mode(),
        ):
            first, second = prompt(model), model(ids(1, 3), use_cache=True).past_key_values
            found = []
            for _ in range(4):
                found += tokens_of(model, first, 2) + tokens_of(model, second, 1)
            logits.append(found)
            if capacity == 1000:
                assert len(replays) >= 4
    assert all(map(torch.equal, *logits))


@pytest.mark.parametrize(
    "options",
    [{"output_router_logits": True}, {"output_hidden_states": True}, {"use_cache": False}],
)
def test_a_call_that_asks_for_more_is_no_graph(options, monkeypatch):
    with (
        placed_lru("qwen3_moe", monkeypatch, 1000) as model,
        torch.inference_mode(),
    ):
        cache, replays = prompt(model), counted(monkeypatch)
        replayed(model, cache, replays)
        replays.clear()
        model(ids(1, 1), past_key_values=cache, **{"use_cache": True, **options})
        assert not replays
        replayed(model, cache, replays)


@pytest.mark.parametrize(
    ("name", "path"), [("qwen3_moe", "mlp.gate"), ("deepseek_v3", "self_attn.kv_b_proj")]
)
def test_hooks_of_a_user_are_called(name, path, monkeypatch):
    """Also those that came after the graph; without them, tokens are graphs again."""
    with placed_lru(name, monkeypatch, 1000) as model, torch.inference_mode():
        cache, replays, calls = prompt(model), counted(monkeypatch), list[int]()
        replayed(model, cache, replays)
        gate = model.get_submodule(f"model.layers.0.{path}")
        registers = gate.register_forward_hook, gate.register_forward_pre_hook
        for register in (*registers, register_module_forward_pre_hook):
            replays.clear()
            hook = register(lambda module, *_: calls.append(1) if module is gate else None)
            tokens_of(model, cache, 3)
            assert len(calls) == 3
            assert not replays
            calls.clear()
            hook.remove()
            replayed(model, cache, replays)
        assert not calls


def test_a_graph_skips_the_hooks_of_the_predictor_alone(monkeypatch):
    """Another probe of the same routers, such as a recorder's, needs each token's inputs."""
    parts = {"kernels": "triton", "capacity": 6, "prefetch": "next-gate"}
    with placed("qwen3_moe", monkeypatch, **parts) as model:
        graph = model.greenroom.bindings._graph
        blocks = [
            each for each in model.modules() if isinstance(getattr(each, "gate", None), nn.Module)
        ]
        assert blocks
        assert all(block.gate._forward_pre_hooks for block in blocks)
        assert not graph._has_hooks()
        probe = GateInputProbe([Router(block.gate, block, 0) for block in blocks])
        assert graph._has_hooks()
        probe.detach()
        assert not graph._has_hooks()


def test_padding_is_seen_after_the_launch(monkeypatch):
    logits = []
    for capacity in (1000, 4):
        with (
            placed_lru("qwen3_moe", monkeypatch, capacity) as model,
            torch.inference_mode(),
        ):
            cache, found = prompt(model), list[torch.Tensor]()
            for number, token in enumerate(ids(6, 1)):
                mask = torch.ones(1, PROMPT + number + 1, dtype=torch.long)
                mask[0, 0] = number != 4
                found.append(model(token[None], past_key_values=cache, attention_mask=mask).logits)
            logits.append(found)
    assert all(map(torch.equal, *logits))


def test_a_graph_with_other_bits_is_refused(monkeypatch, caplog):
    compute = TokenGraph.compute

    def wrong(self: TokenGraph, decode: Any) -> torch.Tensor:
        self.before.fill_(PROMPT - 1)  # it overwrites keys and values of another token
        return compute(self, decode)

    logits = []
    for capacity in (1000, 4):
        with (
            placed_lru("qwen3_moe", monkeypatch, capacity) as model,
            torch.inference_mode(),
        ):
            cache = prompt(model)
            with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
                patch.setattr(TokenGraph, "compute", wrong)
                logits.append(tokens_of(model, cache, 4))
            assert model.greenroom.bindings._graph._refused == (capacity == 1000)
    assert "single tokens of Qwen3MoeModel have other bits as a graph" in caplog.text
    assert torch.equal(logits[0][0], logits[1][0])


def test_a_device_that_does_not_report_is_an_error(monkeypatch):
    with (
        placed_lru("qwen3_moe", monkeypatch, 1000) as model,
        torch.inference_mode(),
    ):
        cache = prompt(model)
        replayed(model, cache, counted(monkeypatch))
        graph = model.greenroom.bindings._graph._threads.graph
        graph._replay = lambda: None
        with pytest.raises(DeviceError, match="has not reported"):
            tokens_of(model, cache, 1)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_moe", "deepseek_v3"])
def test_other_models_and_detached_ones_keep_their_forward(name, monkeypatch):
    with placed_lru(name, monkeypatch, 1000) as model:
        graph = model.greenroom.bindings._graph
        assert (graph is None) == (name == "qwen3_next")  # which has recurrent states
        model.greenroom.compile()
        decoder = model.get_decoder()
        assert ("forward" in vars(decoder)) == (graph is not None)
    assert "forward" not in vars(decoder)
    assert not [m for m in decoder.modules() if {MARK, "expand_kv"} & vars(m).keys()]


def test_bits_do_not_depend_on_options_that_exclude_graphs(monkeypatch):
    """Policies that use gate weights read the choice on the host; attention stays the same."""
    logits = []
    for policy in ("lru", "moe-infinity"):
        with (
            placed_lru("qwen3_moe", monkeypatch, 1000, policy=policy) as model,
            torch.inference_mode(),
        ):
            graph = model.greenroom.bindings._graph
            assert all(each.token_launches for each in graph._bindings) == (policy == "lru")
            assert len(marks_of(model)) == model.config.num_hidden_layers
            logits.append(tokens_of(model, prompt(model), TOKENS))
    assert all(map(torch.equal, *logits))


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


def test_a_cache_that_grows_meanwhile_does_not_exchange_the_graph(monkeypatch):
    """The other graph may have addresses of a KV cache that is gone."""
    replays = counted(monkeypatch)
    with placed_lru("qwen3_moe", monkeypatch, 1000) as model, torch.inference_mode():
        driver, first = model.greenroom.driver, prompt(model)
        replayed(model, first, replays)
        driver.resize(6)
        second = prompt(model, 2)
        tokens_of(model, second, 2)
        read, main = GraphPass._read_call, threading.current_thread()

        @torch.inference_mode()
        def grow() -> None:
            driver.resize(driver.pieces.experts)
            prompt(model)
            assert driver.resident.is_open

        def read_and_grow(self: GraphPass, kwargs: Any) -> Any:
            token = read(self, kwargs)
            if threading.current_thread() is main:
                thread = threading.Thread(target=grow)
                thread.start()
                thread.join()
            return token

        expected = tokens_of(model, copy.deepcopy(second), 1)
        before = [layer.keys.clone() for layer in first.layers]
        assert before[0].shape[2] > second.get_seq_length()
        monkeypatch.setattr(GraphPass, "_read_call", read_and_grow)
        got = tokens_of(model, second, 1)
        assert torch.equal(got[0], expected[0])
        assert all(map(torch.equal, before, [layer.keys for layer in first.layers]))


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


def test_an_expert_that_loses_its_slot_is_no_reason_to_refuse_a_graph(monkeypatch, caplog):
    """Another thread may resize the cache while the first token is compared."""
    compute, replays = TokenGraph.compute, counted(monkeypatch)
    with (
        placed_lru("qwen3_moe", monkeypatch, 1000) as model,
        torch.inference_mode(),
        caplog.at_level(logging.WARNING),
    ):
        shrinks = list[int]()

        def shrink(self: TokenGraph, decode: Any) -> Any:
            shrinks.append(1)
            model.greenroom.driver.changes.table.trim(0)
            return compute(self, decode)

        monkeypatch.setattr(TokenGraph, "compute", shrink)
        tokens_of(model, prompt(model), 2)
        assert shrinks
        assert not replays
        assert not model.greenroom.bindings._graph._refused
    assert not caplog.records


def test_a_graph_follows_weights_that_are_replaced(monkeypatch):
    """At the next request; a graph reads the memory that weights had when it was captured."""
    logits = []
    for refused in (False, True):
        with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
            graph, found, threads = model.greenroom.bindings._graph, list[Any](), list[Any]()
            graph._refused = refused
            for replaced in (False, True, False):
                if replaced:
                    weight = model.model.layers[0].self_attn.q_proj.weight
                    weight.data = weight.data * 1.5
                cache = prompt(model)
                found += tokens_of(model, cache, 2)  # the second one can be a graph
                assert graph._refused == refused
                assert (graph._threads.pieces is None) == refused
                threads.append(graph._threads)
            assert len({*map(id, threads)}) == (1 if refused else 2)
            logits.append(found)
    assert all(map(torch.equal, *logits))


def test_a_model_that_is_detached_has_no_graph(monkeypatch):
    """Its memory would stay until Python's collector finds it."""
    with placed_lru("qwen3_moe", monkeypatch, 6) as model, torch.inference_mode():
        tokens_of(model, prompt(model), 2)
        pieces = weakref.ref(model.greenroom.bindings._graph._threads.pieces)
        assert pieces() is not None
    assert pieces() is None
