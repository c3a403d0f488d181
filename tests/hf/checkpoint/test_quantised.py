"""Quantised safetensors: experts stay as stored, and every bit is that of the expanded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.errors import CheckpointError, ModelError, UnsupportedModel
from greenroom.hf.check.verify import verify
from greenroom.hf.model.reference import load_reference_experts, load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.encodings import ENCODINGS
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.models import make as make_model
from tests.models import read_expert
from tests.quantised import WIDE, compressed, fp8, mxfp4

FIRST = "model.layers.0.mlp.experts"
FORMATS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "fp8": (fp8, {}),
    "fp8, scales in bfloat16": (fp8, {"scales": torch.bfloat16}),
    "fp8, one block": (fp8, {"block": (64, 64), "hidden_size": 64, "moe_intermediate_size": 64}),
    "fp8, shared experts": (fp8, {"name": "deepseek_v3"}),
    "mxfp4": (mxfp4, {}),
    "symmetric4": (compressed, {}),
    "symmetric4, groups of 128": (compressed, {"group": 128, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    make, options = FORMATS[request.param]
    return request.param.split(",")[0], make(tmp_path_factory.mktemp("quantised"), **options)


def test_logits_equal_those_of_the_expanded_model(checkpoint: tuple[str, Path]) -> None:
    encoding, folder = checkpoint
    skeleton = ModelSkeleton.of(folder)
    whole = load_reference_model(skeleton)
    expanded = sum(
        module.get_parameter(name).nbytes
        for module in map(whole.get_submodule, skeleton.catalog.layers)
        for name in ("gate_up_proj", "down_proj")
    )
    assert set(skeleton.catalog.layouts[0].encodings.values()) == {encoding}
    assert skeleton.catalog.all_experts_bytes < expanded * (0.55 if encoding == "fp8" else 0.3)
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize(("make", "error"), [(fp8, 0.04), (mxfp4, 0.15), (compressed, 0.12)])
def test_what_the_reference_tools_make_is_near_the_weights(
    tmp_path: Path, make: Callable[..., Path], error: float
) -> None:
    """Codes and scales mean what their makers meant by them, in their order."""
    name, sizes = ("gpt_oss", {"hidden_size": 64, "intermediate_size": 96})
    if make is not mxfp4:
        name, sizes = "qwen3_moe", WIDE
    before = make_model(name, "bfloat16", **sizes).state_dict()
    for key, tensor in load_reference_experts(ModelSkeleton.of(make(tmp_path)), 0).items():
        plain = before[f"{FIRST}.{key}"].float()
        assert 0 < (tensor.float() - plain).norm() < error * plain.norm(), key


def test_every_expert_equals_transformers_own(checkpoint: tuple[str, Path]) -> None:
    _, folder = checkpoint
    catalog = ModelSkeleton.of(folder).catalog
    for layer, name in enumerate(catalog.layers):
        skeleton = ModelSkeleton.of(folder)
        transposed = skeleton.model.get_submodule(name).is_transposed
        wanted = load_reference_experts(skeleton, layer)
        layout = catalog.layouts[layer]
        for expert_id in range(catalog.offsets[layer], catalog.offsets[layer + 1]):
            tensors = read_expert(catalog, expert_id)
            for key, full in wanted.items():
                weight = layout.weight(key)
                parts = [tensors[part.name] for part in weight.parts]
                made = ENCODINGS[weight.encoding].decode(parts, weight.shape, full.dtype)
                mine = full[expert_id - catalog.offsets[layer]]
                assert torch.equal(made, mine.T if transposed else mine)


@pytest.mark.parametrize("layers", [False, True])
def test_verify_in_another_type_than_that_of_the_scales(tmp_path: Path, layers: bool) -> None:
    folder = str(compressed(tmp_path))
    verdict = verify(folder, "30%", tokens=2, prompt="The", dtype="float32", layers=layers)
    assert verdict.identical
    assert verdict.near


def test_one_read_takes_many_tensors(checkpoint: tuple[str, Path]) -> None:
    """What is not transformed on its way may be read in chunks."""
    encoding, folder = checkpoint
    extents = ModelSkeleton.of(folder).catalog.extents(0)
    codes = [extent for extent in extents if extent.length > 4096]
    assert all(extent.divisible for extent in codes), encoding


def test_experts_in_full_beside_a_quantised_rest(tmp_path: Path) -> None:
    """Formats may leave some matrices out; each lies in its slot as it is stored."""
    folder = fp8(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n and "down_proj" in n]:
        if name.endswith("_scale_inv"):
            del tensors[name]
        else:
            tensors[name] = (tensors[name].float() / 448).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    skeleton = ModelSkeleton.of(folder)
    assert skeleton.catalog.layouts[0].encodings == {"gate_up_proj": "fp8"}
    whole = load_reference_model(skeleton)
    with streamed(folder, capacity=2, kernels="eager", fake=True) as model:
        assert_same(model, whole, ids(1, 9))


# What can be wrong


def scale_of_a_wrong_shape(tensors: dict[str, Any]) -> None:
    name = next(n for n in tensors if n.endswith("3.gate_proj.weight_scale_inv"))
    tensors[name] = tensors[name][:1].contiguous()


def scale_missing(tensors: dict[str, Any]) -> None:
    del tensors[next(n for n in tensors if n.endswith("3.up_proj.weight_scale_inv"))]


def one_expert_in_full(tensors: dict[str, Any]) -> None:
    name = next(n for n in tensors if n.endswith("5.down_proj.weight_scale_inv"))
    del tensors[name]
    name = name.removesuffix("_scale_inv")
    tensors[name] = tensors[name].bfloat16()


def gate_unlike_up(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.endswith("gate_proj.weight_scale_inv")]:
        del tensors[name]
        name = name.removesuffix("_scale_inv")
        tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (scale_of_a_wrong_shape, CheckpointError, ["have shape [1, 1]", "must have shape [2, 1]"]),
        (scale_missing, CheckpointError, ["up_proj.weight_scale_inv are missing"]),
        (one_expert_in_full, UnsupportedModel, ["as fp8", "as bfloat16", "down_proj"]),
        (gate_unlike_up, UnsupportedModel, ["as fp8", "as bfloat16", "gate_up_proj"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damaged_fp8(tmp_path: Path, spoil: Any, kind: type[ModelError], words: list[str]) -> None:
    folder = fp8(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(kind) as error:
        ModelSkeleton.of(folder)
    assert str(folder) in one_line(error)
    assert all(word in one_line(error) for word in words), one_line(error)


# Of the wrong type or shape: what would be read as other numbers


def retyped(last: str, dtype: torch.dtype) -> Callable[[dict[str, Any]], None]:
    """Another type of the same shape, for every tensor whose name ends so."""

    def spoil(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(last)]:
            tensors[name] = torch.ones(tensors[name].shape, dtype=dtype)

    spoil.__name__ = f"{last} in {dtype}"
    return spoil


def resized(last: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    """Another length of the last axes, for every tensor whose name ends so."""

    def spoil(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(last)]:
            old = tensors[name]
            lead = old.shape[: old.ndim - len(shape)] if shape else ()
            tensors[name] = torch.ones((*lead, *shape), dtype=old.dtype)

    spoil.__name__ = f"{last} as {shape}"
    return spoil


@pytest.mark.parametrize(
    ("make", "spoil", "words"),
    [
        (mxfp4, retyped("_scales", torch.int32), ["_scales have dtype int32", "uint8"]),
        (mxfp4, retyped("_scales", torch.float32), ["_scales have dtype float32"]),
        (mxfp4, retyped("_blocks", torch.int8), ["_blocks has dtype int8", "must have uint8"]),
        (mxfp4, resized("_blocks", (15,)), ["_blocks has shape", "must have 16 bytes"]),
        (mxfp4, resized("_blocks", ()), ["_blocks has shape []", "needs at least"]),
        (fp8, retyped("_scale_inv", torch.int32), ["_scale_inv have dtype int32", "float32"]),
        (fp8, retyped("_scale_inv", torch.int8), ["_scale_inv have dtype int8"]),
        (
            fp8,
            resized("down_proj.weight", ()),
            ["weight has shape []", "needs at least"],
        ),
        (compressed, retyped("_scale", torch.int32), ["weight_scale have dtype int32"]),
        (compressed, retyped("_packed", torch.int8), ["has dtype int8", "must have int32"]),
        (compressed, resized("_packed", ()), ["weight_packed has shape []"]),
        (compressed, resized("_scale", ()), ["weight_scale have shape []", "must have shape"]),
        (compressed, resized("_scale", (3,)), ["weight_scale have shape", "must have shape"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_tensors_that_would_be_read_as_other_numbers(
    tmp_path: Path, make: Callable[..., Path], spoil: Any, words: list[str]
) -> None:
    folder = make(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        ModelSkeleton.of(folder)
    assert all(word in one_line(error) for word in words), one_line(error)


@pytest.mark.parametrize("intermediate", [192, 320])
def test_blocks_that_do_not_divide_an_expert(tmp_path: Path, intermediate: int) -> None:
    """192 rows have two rows of scales, for 128 and for 64 of them: not for 96 each."""
    folder = fp8(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["moe_intermediate_size"] = intermediate
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n and not n.endswith("_inv")]:
        shape = (128, intermediate) if "down_proj" in name else (intermediate, 128)
        tensors[name] = torch.ones(shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones([-(-n // 128) for n in shape])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert "is not a multiple of 128" in one_line(error)


@pytest.mark.parametrize(
    ("make", "last", "dtype", "words"),
    [
        (fp8, "5.up_proj.weight_scale_inv", torch.bfloat16, "as fp8 with scales in bfloat16"),
        (
            compressed,
            "5.up_proj.weight_scale",
            torch.float32,
            "as symmetric4 with scales in float32",
        ),
    ],
)
def test_one_expert_s_scales_in_another_type(
    tmp_path: Path, make: Callable[..., Path], last: str, dtype: torch.dtype, words: str
) -> None:
    folder = make(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith(last))
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert "stored in different types" in one_line(error)
    assert words in one_line(error)


def test_mxfp4_without_its_scales(tmp_path: Path) -> None:
    folder = mxfp4(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{FIRST}.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj_scales are missing"):
        ModelSkeleton.of(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bits": 3}, "3 bits"),
        ({"strategy": "tensor"}, "strategy tensor"),
        ({"actorder": "group"}, "reordered by activation"),
        ({"type": "float", "num_bits": 8}, "8 bits"),
    ],
)
def test_other_formats_of_compressed_tensors(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = compressed(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert words in one_line(error)


@pytest.mark.parametrize(
    ("make", "change", "kind", "words"),
    [
        (compressed, {"config_groups": None}, CheckpointError, "config_groups is None"),
        (compressed, {"config_groups": {}}, CheckpointError, "config_groups is {}"),
        (compressed, {"config_groups": [{"targets": ["Linear"]}]}, CheckpointError, "is [{'targ"),
        (compressed, {"config_groups": {"a": 5}}, CheckpointError, "config_groups.a is 5"),
        (compressed, {"format": "nvfp4-pack-quantized"}, UnsupportedModel, "nvfp4-pack-quantized"),
        (compressed, {"format": None}, UnsupportedModel, "None, 4 bits"),
        (fp8, {"weight_block_size": [0, 0]}, CheckpointError, "weight_block_size is [0, 0]"),
        (fp8, {"weight_block_size": [128]}, CheckpointError, "weight_block_size is [128]"),
        (fp8, {"weight_block_size": "128"}, CheckpointError, "weight_block_size is '128'"),
        (fp8, {"weight_block_size": [128.0, 128]}, CheckpointError, "two positive numbers"),
    ],
)
def test_settings_that_say_nothing(
    tmp_path: Path,
    make: Callable[..., Path],
    change: dict[str, Any],
    kind: type[ModelError],
    words: str,
) -> None:
    folder = make(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(kind) as error:
        ModelSkeleton.of(folder)
    assert str(path) in one_line(error)
    assert words in one_line(error), one_line(error)


@pytest.mark.parametrize("size", [0, -2, "32", 1.5])
def test_a_group_of_no_size(tmp_path: Path, size: Any) -> None:
    folder = compressed(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = size
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"group_0.weights.group_size is"):
        ModelSkeleton.of(folder)


def test_groups_of_several_sizes(tmp_path: Path) -> None:
    """Experts in groups of 64, attention in groups of 32: each matrix by its own."""
    folder = compressed(tmp_path, group=32, wider={"experts": 64})
    skeleton = ModelSkeleton.of(folder)
    dense = skeleton.checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (dense.shape, dense.companions[0].shape) == ((32, 128), (32, 4))
    assert skeleton.catalog.layouts[0]["gate_up_proj.scale"].shape == (512, 2)
    whole = load_reference_model(skeleton)
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(1, 7))


@pytest.mark.parametrize("method", ["bitsandbytes", "nonesuch"])
def test_a_method_that_is_not_served_is_named(tmp_path: Path, method: str) -> None:
    folder = mxfp4(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method}
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        ModelSkeleton.of(folder)
    assert f"the quantisation method {method} is not supported" in one_line(error)
