"""Layers in one region: the bits, the caches and the counts of layers one by one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from greenroom.errors import StoreError
from greenroom.runtime.forward import FusedExperts
from greenroom.runtime.kernels.dense import stored
from greenroom.runtime.kernels.dense.attention import OneTokenAttention
from greenroom.runtime.kernels.dense.blocks import router
from greenroom.runtime.kernels.dense.decoder import FusedDecoderLayer
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers
from greenroom.runtime.kernels.resident.launch_plan import LaunchPlan
from tests.hf.attach.test_one_token import ids, layers_of, one_by_one, served, tokens

NAME = "mixtral"  # three layers, of which each is known


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Of each region: how many layers it was for, and how many it did."""
    found: list[tuple[int, int | None]] = []
    several = FusedExperts.resident_steps

    def seen(experts: FusedExperts, first: int, find: Any) -> int | None:
        done = several(experts, first, find)
        found.append((len(experts._layers) - first, done))
        return done

    monkeypatch.setattr(FusedExperts, "resident_steps", seen)
    return found


@pytest.fixture
def unknown_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose choice among equal scores is its own secret."""
    monkeypatch.setattr(router, "_ties_match_torch", lambda router: False)


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """One whose experts are all in their slots, and which has found out its layers' order."""
    with served(NAME) as model:
        for _ in range(3):
            tokens(model, 12)
        assert fused(model)._in_order
        yield model


def fused(model: PreTrainedModel) -> FusedLayers:
    forward = layers_of(model)[0].forward
    parts = [cell.cell_contents for cell in forward.__closure__]
    (found,) = (part for part in parts if isinstance(part, FusedLayers))
    return found


def passed(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """What a layer is given beside a token's hidden states."""
    cos = torch.ones(1, 1, model.config.head_dim).bfloat16()
    return {"position_embeddings": (cos, cos.clone()), "past_key_values": cache}


def make_ties(model: PreTrainedModel) -> None:
    """All experts are liked as one of two: always more than can be chosen."""
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight.copy_(weight[:2].repeat(len(weight) // 2, 1))


def lengths(cache: Any) -> list[int]:
    return [cache.get_seq_length(i) for i in range(len(cache.layers))]


def test_every_token_after_the_first_runs_in_one_parallel_region(model, regions):
    wanted = one_by_one(model)
    assert regions == []
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 3)]


def test_equal_scores_do_not_end_a_region(model, regions):
    make_ties(model)
    wanted = one_by_one(model)
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 3)]


def test_a_missing_expert_is_fetched_and_the_parallel_region_reentered(regions):
    with served(NAME) as model:
        tokens(model, 3)
        model.greenroom.resize(3 * model.greenroom.setup.catalog.slot_bytes)
        model.greenroom.resize(24 * model.greenroom.setup.catalog.slot_bytes)
        wanted = one_by_one(model, count=6)
        model.greenroom.resize(3 * model.greenroom.setup.catalog.slot_bytes)
        model.greenroom.resize(24 * model.greenroom.setup.catalog.slot_bytes)
        regions.clear()
        assert torch.equal(tokens(model), wanted)
    assert any(done is not None and 0 <= done < layers for layers, done in regions)


def test_torch_makes_an_unknown_choice_between_two_parallel_regions(unknown_ties, model, regions):
    make_ties(model)
    wanted = one_by_one(model)
    assert torch.equal(tokens(model), wanted)
    assert regions == 6 * [(3, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_computes_between_its_layers_is_not_fused(when, regions):
    def doubles(layer: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return 2 * out

    with served(NAME) as model:
        if when == "after":
            tokens(model, 4)
            assert fused(model)._in_order
        hook = model.model.layers[1].register_forward_hook(doubles)
        regions.clear()
        found = tokens(model)
        assert len(regions) == (when == "after")
        assert fused(model)._in_order is False
        assert torch.equal(found, one_by_one(model))
        hook.remove()
        assert torch.equal(tokens(model), one_by_one(model))


def test_a_hook_on_a_submodule_runs_the_layers_one_by_one(model, regions):
    wanted, heard = tokens(model), []
    regions.clear()
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: heard.append(True))
    assert torch.equal(tokens(model), wanted)
    assert (len(heard), regions) == (7, [])
    hook.remove()
    layer = model.model.layers[2]
    own, layer.forward = layer.forward, lambda *a, **k: type(layer).forward(layer, *a, **k)
    assert torch.equal(tokens(model), wanted)
    assert regions == []
    layer.forward = own
    assert torch.equal(tokens(model), wanted)
    assert regions


def test_global_hooks_observe_every_module(model, regions):
    wanted, heard = tokens(model), []
    regions.clear()
    hook = register_module_forward_hook(lambda module, *_: heard.append(module))
    try:
        tokens(model)  # by torch's own operations, so that the parts of an attention are heard too
    finally:
        hook.remove()
    assert regions == []
    assert set(model.model.layers[1].self_attn.children()) < set(heard)
    assert torch.equal(tokens(model), wanted)
    assert regions


def test_hooks_on_layers_observe_the_output_of_each_layer(model, regions):
    heard: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: heard.extend((*args, out)))
    cache = model(ids(1, 7), use_cache=True).past_key_values
    heard.clear()
    model(ids(1, 1), past_key_values=cache)
    assert regions
    assert lengths(cache) == [8, 8, 8]
    together, fused(model)._in_order = heard.copy(), False
    cache.crop(-1)
    heard.clear()
    model(ids(1, 1), past_key_values=cache)
    assert len(heard) == len(together) == 6
    assert all(map(torch.equal, heard, together))


def test_a_failure_adds_no_token_to_layers_that_did_not_compute_it(
    unknown_ties, model, monkeypatch
):
    make_ties(model)
    cache = model(ids(1, 7), use_cache=True).past_key_values
    wanted, calls = tokens(model), []

    def fails(*args: Any) -> Any:
        calls.append(True)
        raise StoreError("cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(FusedDecoderLayer, "compute_from_choice", fails)
        with pytest.raises(StoreError):
            model(ids(1, 1), past_key_values=cache)
    assert calls == [True]
    assert lengths(cache) == [7, 7, 7]
    assert torch.equal(tokens(model), wanted)


def test_a_kv_cache_with_a_full_layer_is_not_fused(model, regions, monkeypatch):
    wanted, room = one_by_one(model), OneTokenAttention.reserve

    def of_the_first_two(one: OneTokenAttention, cache: Any) -> Any:
        return room(one, cache) if one.module.layer_idx < 2 else None

    monkeypatch.setattr(OneTokenAttention, "reserve", of_the_first_two)
    cache = model(ids(1, 7), use_cache=True).past_key_values
    layers = fused(model)
    assert layers(0, torch.zeros(1, 1, 64).bfloat16(), passed(model, cache)) is None
    assert regions == [(3, 0)]
    assert lengths(cache) == [7, 7, 7]
    monkeypatch.undo()
    assert torch.equal(tokens(model), wanted)


def test_layers_run_one_by_one_under_a_timeline_or_with_a_small_cache(model, regions):
    wanted = one_by_one(model)
    model.greenroom.timeline()
    assert torch.equal(tokens(model), wanted)
    model.greenroom.timeline(False)
    assert {done for _, done in regions} == {None}
    regions.clear()
    model.greenroom.resize(4 * model.greenroom.setup.catalog.slot_bytes)
    assert torch.equal(tokens(model), wanted)
    assert regions == []  # nobody asks


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """Those that were made, but for what a model has when a test begins."""
    found: list[LaunchPlan] = []
    make = LaunchPlan.__init__

    def made(self: LaunchPlan, *args: Any) -> None:
        make(self, *args)
        found.append(self)

    monkeypatch.setattr(LaunchPlan, "__init__", made)
    return found


def test_kernel_arguments_are_built_once_for_all_tokens_of_a_kv_cache(model, plans):
    wanted = one_by_one(model, count=12)
    fused(model)._pass.plans.clear()
    assert torch.equal(tokens(model, 12), wanted)
    assert len(plans) == 1


def test_kernel_arguments_are_rebuilt_when_the_context_outgrows_them(model, plans, monkeypatch):
    wanted = one_by_one(model, count=12)
    fused(model)._pass.plans.clear()
    monkeypatch.setattr("greenroom.runtime.kernels.resident.launch_plan.AHEAD", 4)
    assert torch.equal(tokens(model, 12), wanted)
    assert len(plans) == 3  # for 8, 13 and 18 tokens


@pytest.mark.parametrize("memory", ["dense", "experts"])
def test_kernel_arguments_are_rebuilt_when_memory_has_moved(memory, plans):
    """A pass of many tokens may have asked for more of what a thread's calls share."""
    with served(NAME) as model:
        cache = model(ids(1, 7), use_cache=True).past_key_values
        for _ in range(4):
            model(ids(1, 1), past_key_values=cache)
        (plan,) = plans
        kernel = plan._experts[0]._kernel
        before = plan._scratch_addresses()
        if memory == "dense":
            stored.thread_scratch(1 << 22)
        else:
            kernel.scratch(1 << 22)
        assert plan._scratch_addresses() != before or not any(plan._strides)
        wanted = one_by_one(model, count=3)
        assert torch.equal(tokens(model, 3), wanted)


def test_a_kv_cache_is_freed_with_its_answer(model, plans):
    """Words that were made for it do not keep its memory."""
    cache = model(ids(1, 7), use_cache=True).past_key_values
    model(ids(1, 1), past_key_values=cache)
    whole = weakref.ref(cache.layers[0]._buffers[0])
    assert whole() is not None
    del cache
    gc.collect()
    assert whole() is None
    assert torch.equal(tokens(model), one_by_one(model))


def test_memory_may_move_between_two_parallel_regions(unknown_ties, model, plans, monkeypatch):
    make_ties(model)
    wanted, choose = one_by_one(model), FusedDecoderLayer.compute_from_choice

    def asks_for_more(self: FusedDecoderLayer, *args: Any) -> torch.Tensor:
        kernel = plans[-1]._experts[0]._kernel if plans else None
        if kernel is not None:
            kernel.scratch(64 + 2 * kernel._local.buffer.numel())
        return choose(self, *args)

    monkeypatch.setattr(FusedDecoderLayer, "compute_from_choice", asks_for_more)
    fused(model)._pass.plans.clear()
    assert torch.equal(tokens(model, 2), wanted[:2])
    assert len(plans) > 2


def test_a_router_replaced_before_the_first_token_may_be_restored(regions):
    with served(NAME) as model:
        gate = model.model.layers[1].mlp.gate
        own, gate.forward = gate.forward, lambda *a: type(gate).forward(gate, *a)
        tokens(model)
        assert all(done is None for _, done in regions)
        gate.forward = own
        wanted = one_by_one(model)
        regions.clear()
        for _ in range(2):
            assert torch.equal(tokens(model), wanted)
        assert (3, 3) in regions


def test_kernel_arguments_are_those_of_any_kv_cache(model, plans):
    wanted = one_by_one(model)
    for _ in range(2):
        assert torch.equal(tokens(model), wanted)
    assert plans == []


def test_two_kv_caches_may_alternate(model):
    wanted = one_by_one(model)
    caches = [model(ids(1, 7), use_cache=True) for _ in range(2)]
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        for number, out in enumerate(caches):
            chosen = out.logits[:, -1:].argmax(-1)
            caches[number] = model(chosen, past_key_values=out.past_key_values)
            found[number].append(caches[number].logits)
    assert torch.equal(torch.cat(found[0]), wanted)
    assert torch.equal(torch.cat(found[1]), wanted)


def test_a_truncated_kv_cache_continues_from_its_end(model, plans):
    cache = model(ids(1, 7), use_cache=True).past_key_values
    first = [model(ids(1, 1), past_key_values=cache).logits for _ in range(3)]
    cache.crop(-3)
    again = [model(ids(1, 1), past_key_values=cache).logits for _ in range(3)]
    assert all(map(torch.equal, first, again))
    assert len(plans) <= 1  # where the cache is another's successor, its words hold


def test_the_next_pass_does_not_change_the_output_of_a_pass(model):
    cache = model(ids(1, 7), use_cache=True).past_key_values
    outs = [
        model(ids(1, 1), past_key_values=cache, output_hidden_states=True).hidden_states
        for _ in range(3)
    ]
    copies = [[each.clone() for each in out] for out in outs]
    model(ids(1, 1), past_key_values=cache)
    for out, copy in zip(outs, copies, strict=True):
        assert all(map(torch.equal, out, copy))


def test_each_thread_has_its_own_kernel_arguments(model, plans):
    """Two answers at once, each in its own thread: neither sees the other's."""
    wanted = one_by_one(model, count=20)
    plans.clear()
    with ThreadPoolExecutor(2) as pool:
        together = threading.Barrier(2)

        def answer() -> torch.Tensor:
            with torch.no_grad():
                together.wait()
                return tokens(model, 20)

        found = [each.result() for each in [pool.submit(answer) for _ in range(2)]]
    assert all(torch.equal(each, wanted) for each in found)
    assert len({id(each) for each in plans}) == 2
