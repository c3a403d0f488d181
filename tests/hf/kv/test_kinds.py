"""Keys and values that are quantised or elsewhere, by transformers' own caches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, QuantizedCache

import greenroom
from greenroom.errors import BudgetError, UsageError
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv import kinds as kv_kinds
from greenroom.hf.kv import sizes as kv_sizes
from greenroom.hf.kv.kinds import CacheKind, cache_kind
from greenroom.hf.kv.sizes import KVBytes, LayerSize, kv_bytes
from greenroom.hf.load.budget import with_host_tier
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.models import cached_tiny, reference

OPTIONS = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture(scope="module")
def folder():
    return cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16")


@pytest.fixture(scope="module")
def skeleton(folder):
    return ModelSkeleton.of(folder)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(5))


QUANTISED = ["fp8", "int4", "int2"]


def installed(name: str) -> None:
    if name != "fp8":
        pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")


@pytest.mark.parametrize("name", QUANTISED)
def test_the_bits_are_those_of_transformers_quantised_cache(folder, name):
    installed(name)
    model, _ = greenroom.load(str(folder), cache="50%", kernels="eager", kv=name)
    try:
        options = model.greenroom.setup.keys_values.kind.generation_options
        expected = reference(folder).generate(
            ids(1, 40), prefill_chunk_size=512, **options, **OPTIONS
        )
        assert torch.equal(model.generate(ids(1, 40), **OPTIONS), expected)
        with torch.no_grad():  # without `generate`, too
            out = model(ids(1, 5))
        assert type(out.past_key_values) is QuantizedCache
    finally:
        model.greenroom.detach()


def test_a_kind_that_saves_nothing_says_so(folder, caplog):
    """Two layers: while one is updated it takes more than both as they are computed."""
    greenroom.load(str(folder), cache="50%", kv="fp8")[0].greenroom.detach()
    (record,) = [r for r in caplog.records if "--kv fp8" in r.getMessage()]
    assert "more memory than --kv dynamic" in record.getMessage()


def test_a_kind_saves_where_there_are_many_layers():
    few, many = ((LayerSize(1024),) * n for n in (4, 48))
    stored = 1024 * 64 // 2  # half of 64 tokens
    fp8 = CacheKind("fp8")
    assert KVBytes(few, fp8, (stored,) * 4).saved_bytes(4096) < 0
    assert KVBytes(many, fp8, (stored,) * 48).saved_bytes(4096) > 10 * 1024 * 4096


def test_compiled_attention_goes_by_the_cache_s_own_update():
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", head_dim=32)
    model, _ = greenroom.load(str(folder), cache="50%", kernels="native", kv="fp8")
    plain, _ = greenroom.load(str(folder), cache="50%", kernels="native")
    try:
        assert model.greenroom.bindings.accelerated.counts["attention"]
        with torch.inference_mode():
            near, exact = (
                each(ids(1, 1), past_key_values=each(ids(1, 30)).past_key_values).logits
                for each in (model, plain)
            )
        assert not torch.equal(near, exact)
        assert (near - exact).float().norm() < 0.2 * exact.float().norm()
    finally:
        model.greenroom.detach()
        plain.greenroom.detach()


@pytest.mark.parametrize("name", QUANTISED)
def test_the_memory_of_a_quantised_cache_is_counted(skeleton, folder, name):
    installed(name)
    sizes = kv_bytes(skeleton.model, name, block=512)
    cache = sizes.kind.cache(skeleton.model.config)
    model = reference(folder)
    with torch.no_grad():
        for tokens in (64, 1, 191):
            model(ids(1, tokens), past_key_values=cache)
    counted = sizes.held_bytes(256)
    assert kv.held_bytes(cache) <= counted
    assert (
        counted
        < kv.held_bytes(cache) + kv_kinds.RESIDUAL * sum(x.token for x in sizes.layers) * 1.2
    )
    assert sizes.update_bytes(256) > 4 * max(layer.held_bytes(256) for layer in sizes.layers)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "switch_transformers"]
)
def test_the_memory_of_a_plain_cache_is_counted(name):
    folder = cached_tiny(name)
    sizes = kv_bytes(ModelSkeleton.of(folder).model, block=64)
    model, seq2seq = reference(folder), name == "switch_transformers"
    answer = {"decoder_input_ids": ids(1, 60)} if seq2seq else {}
    with torch.no_grad():
        cache = model(ids(1, 60), **answer).past_key_values
        kv.make_growing(cache)
        if not seq2seq:
            for _ in range(3):
                model(ids(1, 1), past_key_values=cache)
    assert 0 < kv.held_bytes(cache) <= sizes.held_bytes(63)
    pages = sum(layer.rows for layer in sizes.layers) * kv.PAGESIZE
    forgotten = sum(layer.token * 64 for layer in sizes.layers if layer.max_tokens is not None)
    written = 63 if not seq2seq else 60
    assert sizes.held_bytes(written) <= kv.held_bytes(cache) + pages + forgotten


def test_the_memory_of_a_gpu_s_cache_is_counted():
    layers = (LayerSize(1000),) * 4
    plain = KVBytes(layers, on_a_gpu=True)
    assert plain.held_bytes(257) == 4 * 1000 * 512
    assert plain.update_bytes(257) == 1000 * 257 + kv.FREED
    assert plain.host_bytes(257) == 0
    away = KVBytes(layers, CacheKind("offloaded"), on_a_gpu=True)
    assert away.held_bytes(257) + away.update_bytes(257) == 3 * 1000 * 257
    assert away.host_bytes(257) == 4 * 1000 * 257


def test_keys_and_values_on_the_host_are_of_its_budget(skeleton):
    from greenroom.config import LoadConfig
    from greenroom.hf.memory.setup import ModelSetup

    away = KVBytes((LayerSize(1 << 20),) * 8, CacheKind("offloaded"), on_a_gpu=True)
    parts = ModelSetup(skeleton.catalog, 4, fake=True, context=1024, keys_values=away)
    config = LoadConfig(device="fake", host_memory="7GiB")
    with pytest.raises(BudgetError, match="8 GiB for keys and values"):
        with_host_tier(parts, config)


@pytest.mark.parametrize(
    ("name", "architecture", "message"),
    [
        ("offloaded", "qwen3_moe", "on a CPU use --kv dynamic"),
        ("fp8", "gpt_oss", "--kv fp8 does not work with gpt_oss models"),
        ("fp8", "switch_transformers", "--kv fp8 does not work with switch_transformers models"),
        ("int4", "qwen3_moe", "pip install optimum-quanto"),
    ],
)
def test_kinds_that_a_model_lacks_are_refused(name, architecture, message, monkeypatch):
    monkeypatch.setattr(kv_kinds, "is_optimum_quanto_available", lambda: False)
    model = ModelSkeleton.of(cached_tiny(architecture)).model
    with pytest.raises(UsageError, match=message) as caught:
        cache_kind(name, model, [(2, 8, 8)], on_a_gpu=False)
    assert "\n" not in str(caught.value)


def test_option_names_are_those_of_transformers(skeleton):
    assert CacheKind().generation_options == {}
    assert isinstance(CacheKind().cache(skeleton.model.config), DynamicCache)
    away = cache_kind("offloaded", skeleton.model, [], on_a_gpu=True)
    assert away.generation_options == {"cache_implementation": "offloaded"}
    options = CacheKind("int2", 32).generation_options["cache_config"]
    assert options == {"backend": "quanto", "nbits": 2, "q_group_size": 32, "residual_length": 128}


@pytest.mark.parametrize(
    ("name", "share"), [("qwen3_moe", 0.5), ("gemma4_text", 0.7), ("jetmoe", 1), ("nllb-moe", 0.7)]
)
def test_equal_modules_are_computed_once_for_the_sizes(name, share, monkeypatch):
    model = ModelSkeleton.of(cached_tiny(name)).model
    linear, calls = torch.nn.Linear.forward, []
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda m, x: calls.append(m) or linear(m, x))
    once = outcome(model)
    few = len(calls)
    monkeypatch.setattr(kv_sizes, "_equal_modules_once", lambda model: nullcontext())
    assert once == outcome(model)
    assert few <= share * (len(calls) - few)
    assert not any("forward" in vars(module) for module in model.modules())


def outcome(model):
    try:
        return kv_sizes._layers(model, 64)
    except NotImplementedError as error:
        return str(error)
