"""Keys and values that are quantised, or stored elsewhere."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

import greenroom
from greenroom.errors import BudgetError, UsageError
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv import sizes as kv_sizes
from greenroom.hf.kv.kinds import CacheKind, cache_kind
from greenroom.hf.kv.quantised import QuantisedLayer
from greenroom.hf.kv.single_token import append_token
from greenroom.hf.kv.sizes import KVBytes, LayerSize, kv_bytes
from greenroom.hf.load.budget import with_host_tier
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.kernels.dense.kv_rows import FORMATS
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


QUANTISED = ["int8", "int4"]
NEAR = {"int8": 0.05, "int4": 0.4}  # largest distance of logits, relative


@pytest.fixture(scope="module")
def compiled_folder():
    return cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", head_dim=32)


@contextmanager
def loaded(folder, **options):
    model, _ = greenroom.load(str(folder), **{"cache": "50%", **options})
    try:
        yield model
    finally:
        model.greenroom.detach()


def logits_of(model, prompt=30, tokens=3):
    """The logits of a prompt and of single tokens after it, each with the keys of all before."""
    with torch.inference_mode():
        out = model(ids(1, prompt))
        logits, cache = [out.logits[0]], out.past_key_values
        for token in range(tokens):
            logits.append(model(ids(1, 9)[:, token : token + 1], past_key_values=cache).logits[0])
    return torch.cat(logits).float()


@pytest.mark.parametrize("kernels", ["native", "eager"])
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_quantised_keys_change_logits_a_little(architecture, name, kernels):
    """Also beside sliding windows, with latent attention, and beside recurrent layers."""
    wide = {"head_dim": 32} if architecture in ("qwen3_moe", "gpt_oss") else {}
    folder = cached_tiny(architecture, tokenizer=True, dtype="bfloat16", **wide)
    with loaded(folder, kernels=kernels) as model:
        exact = logits_of(model)
    with loaded(folder, kernels=kernels, kv=name) as model:
        near = logits_of(model)
    assert not torch.equal(near, exact)
    assert (near - exact).norm() < NEAR[name] * exact.norm()


@pytest.mark.parametrize("name", QUANTISED)
def test_single_tokens_read_quantised_rows_in_place(compiled_folder, name, monkeypatch):
    with loaded(compiled_folder, kernels="native", kv=name) as model:
        assert model.greenroom.bindings.reads_in_place
        expected, updates = logits_of(model), []
        update = QuantisedLayer.update
        monkeypatch.setattr(
            QuantisedLayer, "update", lambda *args: (updates.append(1), update(*args))[1]
        )
        assert torch.equal(logits_of(model), expected)
        assert len(updates) == model.config.num_hidden_layers  # the prompt's


@pytest.mark.parametrize("cuda", [False, True])
def test_a_new_cache_has_room_for_the_context_and_is_where_the_model_is(skeleton, cuda):
    """On a GPU tensors grow by blocks: reserved address space is host memory."""
    sizes = KVBytes((), CacheKind("int8"), on_a_gpu=cuda)
    setup = ModelSetup(skeleton.catalog, 4, context=9000, cuda=cuda, keys_values=sizes)
    cache, states = setup.empty_cache(skeleton.model.config), torch.ones(1, 2, 3, 32)
    cache.update(states, states, 0)
    room = append_token(cache, 0)
    assert room is not None
    assert (room.keys.shape[2] == kv.BLOCK) == cuda
    assert cuda or room.keys.shape[2] > 9000


@pytest.mark.parametrize("name", QUANTISED)
def test_the_text_does_not_depend_on_the_expert_cache(compiled_folder, name):
    texts = []
    for cache in ("20%", "100%"):
        with loaded(compiled_folder, cache=cache, kv=name) as model:
            texts.append(model.generate(ids(1, 40), **OPTIONS))
            beams = model.generate(ids(1, 12), num_beams=3, **OPTIONS)
            texts.append(beams)
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_memory_of_a_quantised_cache_is_counted(architecture, name):
    skeleton = ModelSkeleton.of(cached_tiny(architecture, tokenizer=True, dtype="bfloat16"))
    sizes = kv_bytes(skeleton.model, name, block=512)
    with loaded(cached_tiny(architecture, tokenizer=True, dtype="bfloat16"), kv=name) as model:
        cache = None
        with torch.no_grad():
            for tokens in (64, 1, 191):
                cache = model(ids(1, tokens), past_key_values=cache).past_key_values
    pages = sum(layer.rows for layer in sizes.layers) * kv.PAGESIZE
    assert (
        0
        <= sizes.held_bytes(256) - kv.held_bytes(cache)
        <= pages + sum(layer.token * 512 for layer in sizes.layers if layer.max_tokens is not None)
    )


def test_slots_come_back_at_any_number_of_layers():
    """Single tokens need no decoded layer; a prompt needs one."""
    form = FORMATS["int8"]
    plain = LayerSize(512, shape=(1, 128, 128))
    layer = plain.quantised(form)
    assert (layer.token, layer.decoded) == (2 * 136, 512)
    for layers in (1, 3, 48):
        exact = KVBytes((plain,) * layers)
        sizes = KVBytes((layer,) * layers, CacheKind("int8"))
        assert sizes.total_bytes(4096, decodes=False) < 0.55 * exact.total_bytes(4096)
        extra = sizes.total_bytes(4096) - sizes.total_bytes(4096, decodes=False)
        assert extra == 512 * 4096
        assert (sizes.total_bytes(4096) < exact.total_bytes(4096)) == (layers > 2)
    assert LayerSize(512, in_place=False).quantised(form) == LayerSize(512, in_place=False)


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

    away = KVBytes((LayerSize(1 << 20),) * 8, CacheKind("offloaded"), on_a_gpu=True)
    parts = ModelSetup(skeleton.catalog, 4, fake=True, context=1024, keys_values=away)
    config = LoadConfig(device="fake", host_memory="7GiB")
    with pytest.raises(BudgetError, match="8 GiB for keys and values"):
        with_host_tier(parts, config)


@pytest.mark.parametrize(
    ("name", "architecture", "message"),
    [
        ("offloaded", "qwen3_moe", "on a CPU use --kv dynamic"),
        ("int8", "switch_transformers", "--kv int8 does not work with switch_transformers models"),
    ],
)
def test_kinds_that_a_model_lacks_are_refused(name, architecture, message):
    model = ModelSkeleton.of(cached_tiny(architecture)).model
    with pytest.raises(UsageError, match=message) as caught:
        cache_kind(name, model, on_a_gpu=False)
    assert "\n" not in str(caught.value)


def test_a_model_that_reads_stored_keys_is_refused(folder):
    model, forward = ModelSkeleton.of(folder).model, Qwen3MoeAttention.forward

    def peeks(module, x, *args, **kwargs):
        out = forward(module, x, *args, **kwargs)
        cache = kwargs["past_key_values"]
        _ = out[0][:, 0, :8] @ cache.layers[0].keys[0, 0].mT
        return out

    kv_bytes(model, block=512)  # with plain keys it can compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeAttention, "forward", peeks)
        with pytest.raises(UsageError, match="which read stored keys: use --kv dynamic"):
            kv_bytes(model, "int8", block=512)


def test_a_model_without_full_attention_is_refused(monkeypatch):
    model = ModelSkeleton.of(cached_tiny("mixtral", sliding_window=4)).model
    with pytest.raises(UsageError, match="no layer with full attention was found"):
        kv_bytes(model, "int4", block=512)


def test_option_names_are_those_of_transformers(skeleton):
    assert CacheKind().generation_options == CacheKind("int8").generation_options == {}
    assert isinstance(CacheKind().cache(skeleton.model.config), DynamicCache)
    away = cache_kind("offloaded", skeleton.model, on_a_gpu=True)
    assert away.generation_options == {"cache_implementation": "offloaded"}


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
