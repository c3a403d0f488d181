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
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

pytest.importorskip("triton")

from greenroom.errors import DeviceError
from greenroom.hf.attach.graph_pass import GraphPass
from greenroom.hf.attach.token_attention import MARK, TokenAttention
from greenroom.hf.kv.batch import Batch, is_near
from greenroom.runtime.cuda.token_graph import TokenGraph
from greenroom.runtime.probes import GateInputProbe, Router
from tests.hf.attach.graphs import (
    PROMPT,
    TOKENS,
    counted,
    marks_of,
    observed,
    placed_lru,
    prompt,
    replayed,
    tokens_of,
)
from tests.hf.memory.test_device import ids, placed
from tests.models import cached_tiny, reference

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]


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


@pytest.mark.parametrize("name", ["qwen3_moe", "longcat_flash"])
def test_a_graph_counts_uses_as_a_pass_without_it_does(name, monkeypatch):
    """Of a layer's own experts alone: choices of LongCat-Flash may be identities."""
    counts = []
    for refused in (False, True):
        with (
            placed_lru(name, monkeypatch, 1000) as model,
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
