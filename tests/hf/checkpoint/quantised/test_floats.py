"""Floats of eight and four bits in the layouts of several tools: every bit is the reference's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from greenroom.errors import CheckpointError, ModelError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import read_folder
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.quantised import Tensors
from tests.quantised_floats import CASES, decompress, floats, fp8_with_fp4_experts

V4 = ("fp8", "fp4 experts")
SMALL = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
FIRST = "model.layers.0.mlp.experts.3.down_proj.weight"


Make = Callable[..., Path]


def make(folder: Path, method: str, form: str) -> Path:
    if (method, form) == V4:
        return fp8_with_fp4_experts(folder, **SMALL)
    blocks = {"moe_intermediate_size": 256} if form == "fp8 blocks" else {}
    return floats(folder, method, form, **{**SMALL, **blocks})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints that are made once."""
    return cache(lambda *case: make(tmp_path_factory.mktemp("floats"), *case))


@pytest.fixture
def spoilt(made: Make, tmp_path: Path) -> Make:
    """Copies of them, to be changed."""
    return lambda *case: Path(copytree(made(*case), tmp_path / "copy"))


@pytest.fixture(params=[*CASES, V4], ids=", ".join)
def checkpoint(request: Any, made: Make) -> tuple[str, str, Path]:
    return *request.param, made(*request.param)


def test_logits_equal_those_of_the_expanded_model(checkpoint: tuple[str, str, Path]) -> None:
    method, form, folder = checkpoint
    if method == "compressed-tensors":
        skip_unless_expanded(form)
    skeleton = ModelSkeleton.of(folder)
    whole = load_reference_model(skeleton)
    encodings = {*skeleton.catalog.layouts[0].encodings.values()}
    assert {name.removeprefix("ct_") for name in encodings} == {
        {"fp4 experts": "mxfp4", "mxfp8": "fp8"}.get(form, form.split()[0])
    }
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


def test_matrices_equal_those_of_compressed_tensors(checkpoint: tuple[str, str, Path]) -> None:
    """Its results are in bfloat16, or in the type of its scales."""
    method, form, folder = checkpoint
    opened = read_folder(folder)
    stored = load_file(folder / "model.safetensors")
    names = [name for name, tensor in opened.tensors.items() if tensor.encoding != "plain"]
    assert len(names) >= 30
    for name in names[::5]:
        matrix_form = form_of(form, opened.tensors[name].encoding)
        skip_unless_expanded(matrix_form)
        theirs = decompress(state_of(stored, name), matrix_form)
        mine = opened.read(name, torch.bfloat16)
        assert torch.equal(mine, theirs.bfloat16()), (method, name)


def skip_unless_expanded(form: str) -> None:
    """Skip a form that the installed compressed-tensors cannot expand."""
    release = version("compressed-tensors")
    if form == "mxfp4" and release.startswith("0.15."):  # the last for torch 2.9
        pytest.skip(f"compressed-tensors {release} does not decompress MXFP4")


def form_of(form: str, encoding: str) -> str:
    if form == "fp4 experts":
        return "mxfp4" if encoding == "mxfp4" else "fp8 blocks"
    return "mxfp4" if form == "mxfp4 blocks" else form


def state_of(stored: Tensors, name: str) -> dict[str, Tensor]:
    """A matrix's tensors by compressed-tensors' names."""
    stem = name.removesuffix("weight")
    state = {key.removeprefix(stem): tensor for key, tensor in stored.items() if stem in key}
    if "weight" in state and state["weight"].dtype in (torch.uint8, torch.int8):
        state["weight_packed"] = state.pop("weight").view(torch.uint8)
    if "weight_blocks" in state:
        state["weight_packed"] = state.pop("weight_blocks").flatten(1)
    for other in ("weight_scales", "weight_scale_inv"):
        if other in state:
            state["weight_scale"] = state.pop(other)
    if "scale" in state:
        state["weight_scale"] = state.pop("scale")
    if state["weight_scale"].dtype == torch.float8_e8m0fnu:
        four = "weight_packed" in state
        scale = state["weight_scale"]
        state["weight_scale"] = scale.view(torch.uint8) if four else scale.float()
    if state["weight_scale"].ndim == 4:
        state["weight_scale"] = state["weight_scale"][:, 0, :, 0]
    if state["weight_scale"].ndim < 2:
        state["weight_scale"] = state["weight_scale"].view(-1, 1)
    if "weight_scale_2" in state:
        state["weight_global_scale"] = 1 / state.pop("weight_scale_2").view(1)
    return state


def test_settings_in_a_file_of_their_own(spoilt: Make) -> None:
    """ModelOpt wrote them to hf_quant_config.json alone before it wrote them to config.json too."""
    folder = spoilt("modelopt", "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    skeleton = ModelSkeleton.of(folder)
    assert {*skeleton.catalog.layouts[0].encodings.values()} == {"nvfp4"}
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, load_reference_model(skeleton), ids(1, 5))


def test_codes_in_safetensors_own_type(spoilt: Make) -> None:
    """F4 counts values in its shapes, where U8 counts bytes."""
    folder = spoilt("quark", "mxfp4")
    before = read_folder(folder).read(FIRST, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name] = tensors[name].view(torch.float4_e2m1fn_x2)
    save_file(tensors, folder / "model.safetensors")
    after = read_folder(folder)
    assert after.stored[FIRST].shape == (128, 128)
    assert torch.equal(after.read(FIRST, torch.bfloat16), before)


@pytest.mark.parametrize("text", ["{", "[]", '"nvfp4"'])
def test_a_file_of_settings_that_is_none(spoilt: Make, text: str) -> None:
    folder = spoilt("modelopt", "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json") as error:
        read_folder(folder)
    assert one_line(error)


# What can be wrong


def without(last: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(last)]:
            del tensors[name]

    spoil.__name__ = f"without {last}"
    return spoil


def changed(last: str, change: Callable[[Tensor], Tensor], what: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        name = next(n for n in tensors if n.endswith(last))
        tensors[name] = change(tensors[name]).contiguous()

    spoil.__name__ = f"{last} {what}"
    return spoil


def added(last: str, tensor: Tensor) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[FIRST.removesuffix("weight") + last] = tensor

    spoil.__name__ = f"with {last}"
    return spoil


def moved(first: str, second: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(first)]:
            tensors[name.removesuffix(first) + second] = tensors.pop(name)

    spoil.__name__ = f"{first} as {second}"
    return spoil


BAD = CheckpointError
SCALE, MATRIX, GLOBAL = "down_proj.weight_scale", "weight_scale_2", "weight_global_scale"


@pytest.mark.parametrize(
    ("method", "form", "spoil", "kind", "words"),
    [
        ("modelopt", "nvfp4", without(SCALE), BAD, "weight_scale are missing"),
        ("modelopt", "nvfp4", without(MATRIX), BAD, "weight_scale_2 or model"),
        ("compressed-tensors", "nvfp4", without(GLOBAL), BAD, "global_scale) is missing"),
        ("modelopt", "nvfp4", changed(MATRIX, lambda t: t.view(1, 1).repeat(2, 1), "two"), BAD,
         "must have shape [1, 1]"),
        ("modelopt", "nvfp4", changed(MATRIX, Tensor.int, "int"), BAD, "have dtype int32"),
        ("modelopt", "nvfp4", changed(SCALE, Tensor.float, "float"), BAD, "have dtype float32"),
        ("modelopt", "nvfp4", changed(SCALE, lambda t: t[:, :1], "short"), BAD, "must have shape"),
        ("modelopt", "nvfp4", changed("down_proj.weight", lambda t: t[:, :12], "narrow"),
         UnsupportedModel, "24 columns, which is not a multiple of 16"),
        ("modelopt", "nvfp4", changed("down_proj.weight", lambda t: t.view(-1), "flat"), BAD,
         "needs at least 2 axes"),
        ("modelopt", "nvfp4", added("pre_quant_scale", torch.ones(128)), UnsupportedModel,
         "holds a scale of activations"),
        ("modelopt", "nvfp4", changed("down_proj.weight", Tensor.int, "int"), UnsupportedModel,
         "codes in int32"),
        ("modelopt", "nvfp4", moved("down_proj.weight_scale", "down_proj_weight_scale"), BAD,
         "weight_scale are missing"),
        ("modelopt", "fp8 rows", without(SCALE), BAD, "weight_scale are missing"),
        ("modelopt", "fp8 rows", changed(SCALE, lambda t: t[:7], "short"), BAD, "must have shape"),
        ("modelopt", "fp8 rows", changed(SCALE, Tensor.int, "int"), BAD, "have dtype int32"),
        ("quark", "mxfp4", added("weight_zero_point", torch.ones(1)), UnsupportedModel,
         "holds zero points"),
        ("mxfp4", "mxfp4", changed(SCALE, Tensor.float, "float"), BAD, "have dtype float32"),
        ("compressed-tensors", "fp8 rows", moved("3.down_proj.weight", "3.down_proj.other"),
         UnsupportedModel, "belongs to no quantised matrix"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_damaged_tensors(
    spoilt: Make, method: str, form: str, spoil: Any, kind: type[ModelError], words: str
) -> None:
    folder = spoilt(method, form)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(kind) as error:
        read_folder(folder)
    assert str(folder) in one_line(error)
    assert words in one_line(error), one_line(error)


@pytest.mark.parametrize(
    ("method", "form", "change", "words"),
    [
        ("quark", "mxfp4", {"global_quant_config": {"weight": [{"scale_format": "e5m3"}]}}, "e5m3"),
        ("compressed-tensors", "fp8 rows", {"num_bits": 6}, "6 bits, floats"),
        ("compressed-tensors", "fp8 rows", {"num_bits": None}, "None bits, floats"),
        ("compressed-tensors", "nvfp4", {"num_bits": 8}, "nvfp4-pack-quantized, 8 bits"),
        ("compressed-tensors", "fp8 rows", {"symmetric": False}, "asymmetric"),
        ("compressed-tensors", "fp8 rows", {"actorder": "group"}, "reordered by activation"),
        ("compressed-tensors", "fp8 rows", {"strategy": "token"}, "strategy token"),
        ("compressed-tensors", "fp8 rows", {"strategy": "group"}, "group_size None"),
        ("compressed-tensors", "fp8 rows", {"strategy": "block"}, "block_structure None"),
    ],
)
def test_unknown_forms_of_a_known_method(
    spoilt: Make, method: str, form: str, change: dict[str, Any], words: str
) -> None:
    folder = spoilt(method, form)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    where = settings if method == "quark" else settings["config_groups"]["group_0"]["weights"]
    where.update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as error:
        read_folder(folder)
    assert str(path) in one_line(error)
    assert words in one_line(error), one_line(error)
