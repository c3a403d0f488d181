"""A built model equals from_pretrained's in every dense parameter and buffer; no expert is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, modeling_utils

from greenroom.errors import (
    CheckpointError,
    ModelError,
    NotAModel,
    UnknownName,
    UnsupportedModel,
)
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.tokenizer import tokenizer_of
from greenroom.hf.model.implementation import IMPLEMENTATION
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.memory.arena import TensorArena
from tests.gguf_models import write
from tests.hf.conftest import one_line
from tests.models import ARCHITECTURES, MULTIMODAL, cached_tiny, reference


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those that are not saved included."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def assert_dense_equal(model: PreTrainedModel, wanted: PreTrainedModel) -> None:
    mine, theirs = state(model), state(wanted)
    for name, tensor in mine.items():
        assert tensor.device.type == "cpu"
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    streamed = ".experts.", "put_linear."  # the latter are JetMoE's
    assert all(any(part in name for part in streamed) for name in set(theirs) - set(mine))


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MULTIMODAL])
def test_equals_from_pretrained(name: str) -> None:
    folder = cached_tiny(name, dtype="bfloat16")
    skeleton = ModelSkeleton.of(folder)
    expected = skeleton.dense_bytes
    model = skeleton.load()
    wanted = reference(folder)
    assert_dense_equal(model, wanted)
    assert type(model) is type(wanted)
    assert not model.training
    assert expected == sum({id(t): t.nbytes for t in state(model).values()}.values())
    assert model.config._experts_implementation == IMPLEMENTATION
    assert model.config.to_dict() == wanted.config.to_dict()
    assert model.generation_config == wanted.generation_config


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_another_dtype(name: str, dtype: str) -> None:
    """Some parameters stay in float32 then; dense_bytes must know which."""
    folder = cached_tiny(name)
    model = ModelSkeleton.of(folder, dtype).load()
    assert_dense_equal(model, reference(folder, dtype))
    assert ModelSkeleton.of(folder, dtype).dense_bytes == sum(
        t.nbytes for t in state(model).values()
    )


def test_dtype_is_the_weights_where_the_config_has_none(tmp_path: Path) -> None:
    folder = change_config(copy(tmp_path, dtype="bfloat16"), dtype=None)
    assert ModelSkeleton.of(folder).dtype == torch.bfloat16
    assert reference(folder).dtype == torch.bfloat16


def test_tied_embeddings_are_one_tensor() -> None:
    folder = cached_tiny("olmoe", tie_word_embeddings=True)
    model = ModelSkeleton.of(folder).load()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_dense_equal(model, reference(folder))
    assert ModelSkeleton.of(folder).dense_bytes < ModelSkeleton.of(cached_tiny("olmoe")).dense_bytes


def test_layers_for_prediction_of_several_tokens_are_ignored(tmp_path: Path) -> None:
    folder = copy(tmp_path, "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    old = "model.layers.2."
    extra = {n.replace(old, "model.layers.3."): t for n, t in tensors.items() if n.startswith(old)}
    save_file({**tensors, **{n: t.clone() for n, t in extra.items()}}, folder / "model.safetensors")
    skeleton = ModelSkeleton.of(folder)
    assert len(skeleton.catalog.layers) == 2
    assert_dense_equal(skeleton.load(), reference(cached_tiny("deepseek_v3", shards=1)))


def test_no_expert_is_read_and_nothing_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(cached_tiny("qwen3_moe"), tmp_path / "model")  # nobody else's
    names: list[str] = []
    read = Checkpoint.read

    def spy(checkpoint: Checkpoint, name: str, *dtype: torch.dtype) -> torch.Tensor:
        names.append(name)
        return read(checkpoint, name, *dtype)

    monkeypatch.setattr(Checkpoint, "read", spy)
    ModelSkeleton.of(folder).load()
    assert len(names) == len(set(names))
    assert names
    assert not any(".experts." in name for name in names)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) not in maps.read_text()


def test_a_model_is_moved_to_its_device_without_a_device_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a map, transformers sizes the memory of an accelerator by names that are detached."""
    monkeypatch.setattr(modeling_utils, "is_accelerator_device", lambda device: True)
    model = ModelSkeleton.of(cached_tiny("qwen3_moe")).load("meta")
    assert {tensor.device.type for tensor in state(model).values()} == {"meta"}


def test_expert_attributes_are_there_and_empty() -> None:
    skeleton = ModelSkeleton.of(cached_tiny("gpt_oss"))
    model = skeleton.load()
    experts = model.get_submodule(skeleton.catalog.layers[0])
    assert experts.gate_up_proj is None
    assert experts.down_proj is None
    assert experts.gate_up_proj_bias.shape == (8, 96)
    assert not any(p.is_meta for p in model.parameters())


# What can be wrong


def copy(tmp_path: Path, name: str = "qwen3_moe", **options: Any) -> Path:
    return shutil.copytree(cached_tiny(name, shards=1, **options), tmp_path / "model")


def change_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its config, nor of its model, nor of its tokenizer, and nobody is asked."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(str(text)) or "y")
    folder = copy(tmp_path, tokenizer=True)
    marker = tmp_path / "was-run"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    for file, names in {
        "config.json": ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"),
        "tokenizer_config.json": ("AutoTokenizer",),
    }.items():
        path = folder / file
        own = {name: ["code.Own", "code.Own"] if "Tok" in name else "code.Own" for name in names}
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": own}))
    skeleton = ModelSkeleton.of(folder)
    skeleton.load()
    tokenizer_of(skeleton.checkpoint)
    assert not marker.exists()
    assert not asked


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"model_type": "nonesuch"}, UnsupportedModel, "does not know the model type nonesuch"),
        (
            {"model_type": "nonesuch", "auto_map": {"AutoConfig": "x.Y"}},
            UnsupportedModel,
            "needs code from the model's repository",
        ),
        ({"model_type": "bert"}, CheckpointError, ""),
        ({"model_type": "clip_text_model"}, UnsupportedModel, "no class that generates text"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            UnsupportedModel,
            "the quantisation method bitsandbytes",
        ),
        (
            {"text_config": {"quantization_config": {"quant_method": "hqq"}}},
            UnsupportedModel,
            "the quantisation method hqq",
        ),
        ({"hidden_size": "many"}, CheckpointError, "not a valid qwen3_moe config"),
        ({"hidden_act": "nonesuch"}, UnsupportedModel, "Qwen3MoeForCausalLM"),
        ({"dtype": "float64"}, UnsupportedModel, "dtype float64 is not supported"),
        ({"hidden_size": 64}, CheckpointError, "has shape"),
        ({"vocab_size": 512}, CheckpointError, "the config says [512, 32]"),
    ],
)
def test_a_config_that_cannot_be_served(
    tmp_path: Path, values: dict[str, Any], kind: type[ModelError], message: str
) -> None:
    folder = change_config(copy(tmp_path), **values)
    if values.get("model_type") == "bert":
        kind = ModelError  # a dense model, and not this checkpoint's: any clear line will do
    with pytest.raises(kind) as error:
        ModelSkeleton.of(folder)
    assert message in one_line(error)


def test_dense_parameters_missing(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder)
    assert "model.layers.1.mlp.up_proj.weight is missing (and 1 more)" in one_line(error)


def test_dense_parameter_of_a_wrong_shape(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder)
    assert "model.norm.weight has shape [31], but the config says [32]" in one_line(error)


def test_converted_dense_parameter_of_a_wrong_shape(tmp_path: Path) -> None:
    """Only the conversion itself can tell, so it is found on loading: before anything is served."""
    folder = copy(tmp_path, "minimax_m3_vl_text")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("gate_proj.weight") or ".shared" in n)
    tensors[name] = torch.zeros(tensors[name].shape[0], 31)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder).load()
    assert str(folder) in one_line(error)


def test_an_unknown_dtype() -> None:
    with pytest.raises(UnknownName, match="'int8': choose one of auto, float32"):
        ModelSkeleton.of(cached_tiny("qwen3_moe"), "int8")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotAModel):
        ModelSkeleton.of(tmp_path)


def test_tensors_without_a_parameter_give_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.extra.weight"] = torch.zeros(2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    ModelSkeleton.of(folder)
    (record,) = [r for r in caplog.records if r.name.startswith("greenroom")]
    assert "1 of the checkpoint's tensors, such as model.extra.weight: they" in record.message


def test_the_config_of_a_caller_is_not_shared() -> None:
    folder = cached_tiny("qwen3_moe")
    assert ModelSkeleton.of(folder).model.config is not ModelSkeleton.of(folder).model.config
    assert AutoConfig.from_pretrained(folder)._experts_implementation != IMPLEMENTATION


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_dense_parameters_lie_side_by_side_in_large_pages(kind, tmp_path, monkeypatch):
    """Whatever is loaded to memory: as it is, converted or stored; nothing twice."""
    taken: list[torch.Tensor] = []
    empty = TensorArena.empty

    def seen(self: TensorArena, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append(empty(self, *shape, dtype=dtype))
        return taken[-1]

    monkeypatch.setattr(TensorArena, "empty", seen)
    if kind == "gguf":
        skeleton = ModelSkeleton.of(str(write(tmp_path / "tiny.gguf", "qwen3_moe", {"": "Q8_0"})))
        skeleton.keep_dense_encoded()
    else:
        skeleton = ModelSkeleton.of(cached_tiny("qwen3_moe"))
    model = skeleton.load()
    places = {tensor.data_ptr() for tensor in taken}
    parameters = [p for p in model.parameters() if p is not None]
    assert parameters
    assert all(p.data_ptr() in places for p in parameters)
    assert sum(t.nbytes for t in taken) <= skeleton.dense_bytes + 64 * len(taken)
