"""The catalog points at the right bytes: compared with from_pretrained, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import (
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    Transpose,
    WeightConverter,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from greenroom.core.layout import Catalog
from greenroom.errors import CheckpointError, NotMoE, UnsupportedModel
from greenroom.hf.index.experts import expert_modules
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.hf.check.test_parity import NAMED
from tests.hf.conftest import one_line, write_safetensors
from tests.models import ARCHITECTURES, MULTIMODAL, OTHERWISE, cached_tiny, read_expert, reference


def assert_experts_equal(catalog: Catalog, model: PreTrainedModel) -> None:
    for layer, name in enumerate(catalog.layers):
        module = model.get_submodule(name)
        for expert_id in range(catalog.offsets[layer], catalog.offsets[layer + 1]):
            for key, tensor in read_expert(catalog, expert_id).items():
                wanted = getattr(module, key)[expert_id - catalog.offsets[layer]]
                assert tensor.dtype == wanted.dtype
                assert torch.equal(tensor, wanted), (name, expert_id, key)


INDEXED = sorted({*ARCHITECTURES, *MULTIMODAL} - OTHERWISE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in INDEXED),
        *((name, "float32") for name in NAMED),
        *(pytest.param(n, "float32", marks=pytest.mark.slow) for n in INDEXED if n not in NAMED),
    ],
)
def test_every_architecture(name: str, dtype: str) -> None:
    folder = cached_tiny(name, dtype=dtype)
    catalog = ModelSkeleton.of(folder).catalog
    assert len(catalog.files) > 1
    assert_experts_equal(catalog, reference(folder))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    ("stored", "asked"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")],
)
def test_cast_on_copy(name: str, stored: str, asked: str) -> None:
    folder = cached_tiny(name, dtype=stored)
    catalog = ModelSkeleton.of(folder, asked).catalog
    assert not catalog.extents(0)[0].divisible
    assert_experts_equal(catalog, reference(folder, dtype=asked))


def test_neighbours_are_one_extent_and_one_run() -> None:
    """save_pretrained puts down, gate and up of one expert side by side; so does the slot."""
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe", shards=1)).catalog
    for expert_id in range(catalog.experts):
        (extent,) = catalog.extents(expert_id)
        (copy,) = extent.copies
        assert copy.contiguous
        assert extent.length == copy.nbytes == catalog.slot_bytes


def test_dense_layers_do_not_count() -> None:
    catalog = ModelSkeleton.of(cached_tiny("qwen3_moe")).catalog
    assert catalog.layers == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
    assert catalog.offsets == (0, 8, 16)


def test_biases_are_not_streamed() -> None:
    skeleton = ModelSkeleton.of(cached_tiny("gpt_oss"))
    names = {spec.name for spec in skeleton.catalog.layouts[0].tensors}
    assert names == {"down_proj", "gate_up_proj"}
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in dict(skeleton.model.named_parameters())


def test_experts_arranged_alike_share_their_copies() -> None:
    catalog = ModelSkeleton.of(cached_tiny("mixtral", shards=1)).catalog
    assert len({id(catalog.extents(e)[0].copies) for e in range(8)}) == 1


# Conversions that move elements one by one: the copies are strided


@pytest.mark.parametrize(("stored", "asked"), [("float32", "auto"), ("bfloat16", "float32")])
def test_experts_stored_transposed(tmp_path: Path, stored: str, asked: str) -> None:
    """Qwen3-VL-MoE's first checkpoints: [E, H, 2I] where the model has [E, 2I, H]."""
    folder, tensors = copy_single(tmp_path, "qwen3_vl_moe", dtype=stored)
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")
    catalog = ModelSkeleton.of(folder, asked).catalog
    assert not any(extent.divisible for extent in catalog.extents(3))
    assert sum(len(extent.copies) for extent in catalog.extents(3)) == 2
    assert_experts_equal(catalog, reference(folder, dtype=asked))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_experts_stored_interleaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposed: bool, inverse: bool
) -> None:
    """Gate and up row by row, as Inkling stores them; here in a model that is quick to make."""
    operations = [Interleave(dim=1, inverse=inverse), *[Transpose(1, 2)] * transposed]
    moved = WeightConverter("mlp.experts.w13", "mlp.experts.gate_up_proj", operations)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")  # fills the cache
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    folder, tensors = copy_single(tmp_path, "gpt_oss")
    monkeypatch.setitem(cache, "gpt_oss", [moved])
    for name in [n for n in tensors if n.endswith("experts.gate_up_proj")]:
        tensor = tensors.pop(name)
        fused = tensor.transpose(1, 2).contiguous() if transposed else tensor
        tensors[name.replace("gate_up_proj", "w13")] = fused
    save_file(tensors, folder / "model.safetensors")
    catalog = ModelSkeleton.of(folder).catalog
    copies = [copy for extent in catalog.extents(0) for copy in extent.copies]
    assert len([copy for copy in copies if not copy.contiguous]) == 2
    assert_experts_equal(catalog, reference(folder))


def test_many_to_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = WeightConverter(
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        [ErnieFuseAndSplitTextVisionExperts()],
    )
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")  # fills the cache
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    folder = cached_tiny("gpt_oss")
    monkeypatch.setitem(cache, "gpt_oss", [many])
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert "shares checkpoint tensors with other parameters" in one_line(error)


# Any names, order, shards and sizes

H_SIZES = st.sampled_from([4, 6, 8])


def random_checkpoint(folder: Path, data: st.DataObject) -> dict[str, torch.Tensor]:
    """A Qwen3-MoE checkpoint written in a drawn layout; its experts as the model will have them."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    experts, layers = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 2))
    size, inner = data.draw(H_SIZES), data.draw(st.integers(1, 5))
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=12,
        hidden_size=size,
        intermediate_size=4,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=experts,
        num_experts_per_tok=1,
        tie_word_embeddings=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).state_dict()
    made = {k: torch.randn(v.shape, dtype=config.dtype) for k, v in shapes.items()}
    written = {}
    fused = data.draw(st.booleans())
    prefix = data.draw(st.booleans())
    for name, tensor in made.items():
        stem, _, last = name.rpartition(".")
        short = name if prefix else name.removeprefix("model.")
        short_stem = stem if prefix else stem.removeprefix("model.")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if last == "gate_up_proj" and not fused:
            for e in range(experts):
                written[f"{short_stem}.{e}.gate_proj.weight"] = tensor[e, :inner]
                written[f"{short_stem}.{e}.up_proj.weight"] = tensor[e, inner:]
        elif last == "down_proj" and tensor.ndim == 3 and not fused:
            for e in range(experts):
                written[f"{short_stem}.{e}.down_proj.weight"] = tensor[e]
        else:
            written[short] = tensor
    names = list(written)
    if data.draw(st.booleans()):
        rng.shuffle(names)
    shards = data.draw(st.integers(1, 4))
    places = {name: f"part-{rng.randrange(shards)}.safetensors" for name in names}
    for file in set(places.values()):
        write_safetensors(folder / file, {n: written[n] for n in names if places[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return {name: tensor for name, tensor in made.items() if tensor.ndim == 3}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layout(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        wanted = random_checkpoint(Path(name), data)
        catalog = ModelSkeleton.of(name).catalog
        for expert_id in range(catalog.experts):
            layer = catalog.layer_of(expert_id)
            extents = catalog.extents(expert_id)
            assert list(extents) == sorted(extents, key=lambda x: (x.file, x.offset))
            for key, tensor in read_expert(catalog, expert_id).items():
                full = wanted[f"{catalog.layers[layer]}.{key}"]
                assert torch.equal(tensor, full[expert_id - catalog.offsets[layer]])


# What can be wrong with experts


def copy_single(
    tmp_path: Path, name: str = "qwen3_moe", **options: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A one-file checkpoint that a test may change, and its tensors."""
    folder = shutil.copytree(cached_tiny(name, shards=1, **options), tmp_path / "model")
    return folder, load_file(folder / "model.safetensors")


FIRST = "model.layers.0.mlp.experts"


def drop_one(tensors: dict[str, Any]) -> None:
    del tensors[f"{FIRST}.5.up_proj.weight"]


def drop_last(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith(f"{FIRST}.7.")]:
        del tensors[name]


def drop_kind(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith(FIRST) and "up_proj" in n]:
        del tensors[name]


def drop_layer(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith(FIRST)]:
        del tensors[name]


def one_too_many(tensors: dict[str, Any]) -> None:
    for kind in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{FIRST}.8.{kind}.weight"] = tensors[f"{FIRST}.7.{kind}.weight"].clone()


def wrong_shape(tensors: dict[str, Any]) -> None:
    tensors[f"{FIRST}.3.gate_proj.weight"] = torch.zeros(24, 31)


def first_wrong(tensors: dict[str, Any]) -> None:
    tensors[f"{FIRST}.0.down_proj.weight"] = torch.zeros(32, 25)


def all_wrong(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith(FIRST) and "down" in n]:
        tensors[name] = torch.zeros(30, 24)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_one, [f"{FIRST}.5.up_proj.weight is missing", "8 experts"]),
        (drop_last, [f"{FIRST}.7.", "is missing", "8 experts"]),
        (drop_kind, [f"{FIRST}.gate_up_proj is made from tensors named like", "up_proj.weight"]),
        (drop_layer, [f"no tensor for {FIRST}."]),
        (one_too_many, ["9 tensors named like", f"{FIRST}.8.", "8 experts"]),
        (
            wrong_shape,
            [f"{FIRST}.3.gate_proj.weight has shape [24, 31]", "must have shape [24, 32]"],
        ),
        (
            first_wrong,
            [f"{FIRST}.0.down_proj.weight has shape [32, 25]", "must have shape [32, 24]"],
        ),
        (all_wrong, [f"{FIRST}.0.down_proj.weight [30, 24]", "has shape [32, 24]"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damaged_experts_are_named(tmp_path: Path, spoil: Any, words: list[str]) -> None:
    folder, tensors = copy_single(tmp_path)
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder)
    assert str(folder) in one_line(error)
    assert all(word in one_line(error) for word in words), one_line(error)


def test_fused_experts_of_a_wrong_number(tmp_path: Path) -> None:
    folder, tensors = copy_single(tmp_path, "gpt_oss")
    tensors[f"{FIRST}.down_proj"] = tensors[f"{FIRST}.down_proj"][:7].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder)
    assert f"{FIRST}.down_proj has shape [7, 48, 32]" in one_line(error)


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    folder, tensors = copy_single(tmp_path)
    name = f"{FIRST}.2.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert f"{name} of an expert has dtype float8_e4m3fn without scales" in one_line(error)


def test_experts_of_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    folder, tensors = copy_single(tmp_path)
    name = f"{FIRST}.2.down_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert f"{name} as bfloat16" in one_line(error)
    assert "as float32" in one_line(error)


def bare(tmp_path: Path, model_type: str, **values: Any) -> Path:
    """A folder with a config and a file of one tensor."""
    config = AutoConfig.for_model(model_type, **values)
    config.save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}


def test_a_dense_model(tmp_path: Path) -> None:
    with pytest.raises(NotMoE) as error:
        ModelSkeleton.of(bare(tmp_path, "llama", **SMALL, num_attention_heads=4, dtype="float32"))
    assert "LlamaForCausalLM: this is a dense model" in one_line(error)


def test_a_moe_config_without_moe_layers(tmp_path: Path) -> None:
    folder = bare(tmp_path, "qwen3_moe", **SMALL, mlp_only_layers=[0, 1], dtype="float32")
    with pytest.raises(NotMoE):
        ModelSkeleton.of(folder)


def test_experts_of_another_kind(tmp_path: Path) -> None:
    folder = bare(tmp_path, "doge", **SMALL, num_attention_heads=4, is_moe=True, num_experts=16)
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert "its experts are single rows of two embeddings" in one_line(error)


def test_experts_of_a_kind_that_nobody_knows() -> None:
    class NewSparseMoeBlock(torch.nn.Module):
        pass

    with pytest.raises(UnsupportedModel) as error:
        expert_modules(torch.nn.Sequential(NewSparseMoeBlock()))  # type: ignore[arg-type]
    assert "not supported: its experts (NewSparseMoeBlock)" in one_line(error)
