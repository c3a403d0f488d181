"""A pass that verifies drafts gives each token the bits of a pass of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.core.config.base import Approximation
from greenroom.core.predictor import PassStart
from greenroom.hf.kv.batch import Batch
from greenroom.hf.kv.cache import truncate
from greenroom.hf.kv.draft_pass import MOST_ROWS, DraftPass
from greenroom.hf.kv.kinds import CacheKind
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.kernels.dense.blocks import router
from greenroom.runtime.kernels.resident.fused_layers import FusedLayers
from tests.gguf_models import write
from tests.hf.kv.test_batch import WIDE, attached, draw, served

COMPILED = {
    "qwen3_moe": WIDE,
    "mixtral": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2_moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def compare(model: Any) -> None:
    """Compare passes of every number of tokens, of one and two sequences, with single tokens."""
    verify, batch = DraftPass(model), Batch(model)
    assert verify.obstacle == ""
    assert verify.description == "speculation by lookup"
    one, two = draw(9 + MOST_ROWS, 5 + MOST_ROWS)
    with torch.inference_mode():
        caches, expected = [batch.cache(), batch.cache()], []
        for ids, cache, begin in ((one, caches[:1], 9), (two, caches[1:], 5)):
            batch([ids[:begin]], cache)
            expected.append(torch.stack([batch([[t]], cache)[0] for t in ids[begin:]]))
            truncate(cache[0], begin)
        for count in range(1, MOST_ROWS + 1):
            (logits,) = verify([one[9 : 9 + count]], caches[:1])
            assert torch.equal(logits, expected[0][:count])
            assert caches[0].get_seq_length() == 9 + count
            truncate(caches[0], 9)
        both = verify([one[9:12], two[5:18]], caches)
        assert torch.equal(both[0], expected[0][:3])
        assert torch.equal(both[1], expected[1][:13])
        truncate(caches[1], 7)  # two tokens were right
        assert torch.equal(verify([two[7:8]], caches[1:])[0], expected[1][2:3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", COMPILED)
def test_each_token_has_the_bits_of_a_pass_of_its_own(name: str, dtype: str) -> None:
    with served(name, dtype, **COMPILED[name]) as model:
        compare(model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ3_S"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_stored_formats_have_the_same_bits_too(name: str, kind: str, tmp_path: Any) -> None:
    options = {"n_group": 1} if name == "glm4_moe" else {}
    path = write(tmp_path / "tiny.gguf", name, {"": kind}, **options)
    with attached(path, stored=True) as model:
        compare(model)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_keys_and_values_have_the_same_bits_too(kind: str) -> None:
    parts = {"keys_values": KVBytes((), CacheKind(kind))}
    with served("qwen3_moe", "bfloat16", parts=parts, **WIDE) as model:
        compare(model)


# Models whose layers are all computed in one region.
FUSED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "mlp_only_layers": []},
    "mixtral": COMPILED["mixtral"],
    "glm4_moe": {**WIDE, "first_k_dense_replace": 0, "n_group": 1},
}


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each pass that was computed in parallel regions: how many layers, and tokens."""
    found: list[tuple[int, int]] = []
    compute = FusedLayers.compute

    def computed(self: FusedLayers, x: torch.Tensor, kwargs: Any) -> Any:
        outputs = compute(self, x, kwargs)
        if outputs is not None:
            found.append((len(outputs), outputs.shape[2]))
        return outputs

    monkeypatch.setattr(FusedLayers, "compute", computed)
    return found


def compare_resident(model: Any, regions: list[tuple[int, int]]) -> None:
    """Compare passes whose layers are computed in one region, also of two sequences."""
    for _ in range(2):  # the first time, experts are fetched
        regions.clear()
        compare(model)
    layers = model.config.num_hidden_layers
    assert {count for done, count in regions if done == layers} == {*range(1, MOST_ROWS + 1)}


RESIDENT = {"capacity": 64, "policy": "lru"}  # lru is what `auto` is there


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUSED)
def test_the_bits_are_the_same_where_all_experts_are_resident(
    name: str, dtype: str, regions: list[tuple[int, int]]
) -> None:
    with served(name, dtype, parts=RESIDENT, **FUSED[name]) as model:
        compare_resident(model, regions)


@pytest.mark.parametrize("options", [COMPILED["qwen2_moe"], WIDE], ids=["qwen2_moe", "qwen3_moe"])
def test_the_bits_are_the_same_with_shared_experts_and_other_layers(
    options: dict[str, Any], request: Any
) -> None:
    with served(request.node.callspec.id, "bfloat16", parts=RESIDENT, **options) as model:
        compare(model)


GLM = {**WIDE, "first_k_dense_replace": 1}


@pytest.mark.parametrize("capacity", [64, 5])
@pytest.mark.parametrize("width", [64, 72])
def test_the_bits_are_the_same_with_a_router_that_torch_computes(width: int, capacity: int) -> None:
    options = {**GLM, "moe_intermediate_size": width, "intermediate_size": 2 * width}
    parts = {"capacity": capacity, "policy": "lru"}
    with served("glm4_moe", "bfloat16", parts=parts, **options) as model:
        compare(model)


def test_blocks_with_such_a_router_are_called_once_for_all_tokens(monkeypatch: Any) -> None:
    options, calls = {**GLM, "moe_intermediate_size": 64, "intermediate_size": 128}, list[int]()
    with served("glm4_moe", "bfloat16", parts=RESIDENT, **options) as model:
        verify, batch = DraftPass(model), Batch(model)
        cache, (ids,) = [batch.cache()], draw(12)
        batch([ids[:8]], cache)
        block = type(model.model.layers[-1].mlp)
        forward = block.forward
        monkeypatch.setattr(
            block, "forward", lambda self, x: calls.append(x.shape[1]) or forward(self, x)
        )
        verify([ids[8:]], cache)
        assert calls == [4] * (model.config.num_hidden_layers - 1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ3_S"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_resident_stored_formats_have_the_same_bits_too(
    name: str, kind: str, regions: list[tuple[int, int]], tmp_path: Any
) -> None:
    options = {"n_group": 1, "first_k_dense_replace": 0} if name == "glm4_moe" else {}
    path = write(tmp_path / "tiny.gguf", name, {"": kind}, **options)
    with attached(path, stored=True, **RESIDENT) as model:
        compare_resident(model, regions)


def test_missing_experts_and_unknown_ties_end_a_region_of_several_tokens(
    regions: list[tuple[int, int]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(router, "_ties_match_torch", lambda router: False)
    with served("mixtral", "bfloat16", parts=RESIDENT, **FUSED["mixtral"]) as model:
        for layer in model.model.layers:  # experts are liked as one of two
            weight = layer.mlp.gate.weight.data
            weight.copy_(weight[:2].repeat(len(weight) // 2, 1))
        compare(model)
        slot_bytes = model.greenroom.setup.catalog.slot_bytes
        model.greenroom.resize(3 * slot_bytes)
        model.greenroom.resize(64 * slot_bytes)
        regions.clear()
        compare(model)
        assert regions


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [("qwen3_next", "does not store keys and values token by token"),
     ("deepseek_v3", "not every layer is computed token by token")],
)  # fmt: skip
def test_models_without_such_passes_name_the_reason(name: str, obstacle: str) -> None:
    with served(name, "bfloat16") as model:
        verify = DraftPass(model)
        assert obstacle in verify.obstacle
        assert verify.description == f"no speculation: {verify.obstacle}"


def test_a_model_whose_tokens_see_later_ones_has_no_drafts(monkeypatch: Any) -> None:
    reserve = torch.equal
    with served("qwen3_moe", "bfloat16", **WIDE) as model, monkeypatch.context() as patch:
        calls: list[int] = []

        def equal(a: Any, b: Any) -> bool:
            calls.append(len(a.shape))
            return len(a.shape) != 2 and reserve(a, b)  # logits of several tokens differ

        patch.setattr(torch, "equal", equal)
        obstacle = DraftPass(model).obstacle
    assert 2 in calls
    assert "a token's bits depend on the tokens after it" in obstacle


def test_approximated_misses_exclude_drafts(monkeypatch: Any) -> None:
    with served("qwen3_moe", "bfloat16", **WIDE) as model:
        monkeypatch.setattr(ModelSetup, "approximation", Approximation())
        assert "misses are approximated" in DraftPass(model).obstacle


def test_predictors_observe_one_pass_of_single_tokens(monkeypatch: Any) -> None:
    with served("qwen3_moe", "bfloat16", **WIDE) as model:
        verify, batch = DraftPass(model), Batch(model)
        begun: list[PassStart] = []
        begin = model.greenroom.driver.begin_pass
        monkeypatch.setattr(
            model.greenroom.driver, "begin_pass", lambda at: (begun.append(at), begin(at))
        )
        caches = [batch.cache()]
        with torch.inference_mode():
            batch(draw(6), caches)
            verify([[7, 8, 9]], caches)
    assert [(at.request, at.tokens, at.prefill) for at in begun] == [(1, 6, True), (1, 3, False)]
