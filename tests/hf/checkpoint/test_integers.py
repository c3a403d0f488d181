"""AWQ, GPTQ and compressed-tensors' integers have the bits of the tool's own dequantisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.errors import CheckpointError, ModelError, StoreError, UnsupportedModel
from greenroom.hf.model.reference import load_reference_experts, load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pack.packing import pack
from greenroom.runtime.kernels.dense.stored import stored_matrix
from tests.hf.check.test_parity import assert_same, ids, streamed
from tests.hf.conftest import one_line
from tests.integers import awq, change_settings, compressed_integers, gptq

Make = Callable[..., Path]
FORMATS: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "awq": ("affine4", awq, {"dtype": "float16"}),
    "awq in bfloat16": ("affine4", awq, {"group": 64}),
    "gptq": ("affine4", gptq, {"dtype": "float16"}),
    "gptq_v2, 8 bits": ("affine8", gptq, {"bits": 8, "form": "gptq_v2", "group": 64}),
    "gptq, act order": ("indexed4", gptq, {"ordered": True}),
    "gptq, act order, 8 bits": ("indexed8", gptq, {"ordered": True, "bits": 8}),
    "gptq, one group": ("affine4", gptq, {"group": -1, "ordered": True, "symmetric": True}),
    "zero points": ("affine4", compressed_integers, {}),
    "zero points, 8 bits, rows": ("affine8", compressed_integers, {"bits": 8, "group": None}),
    "rows": ("symmetric4", compressed_integers, {"symmetric": True, "group": None}),
    "int8": (
        "symmetric8",
        compressed_integers,
        {"bits": 8, "symmetric": True, "form": "int-quantized", "group": None},
    ),
    "int8, zero points": (
        "affine8",
        compressed_integers,
        {"bits": 8, "form": "naive-quantized", "scales": torch.float32},
    ),
}


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    encoding, make, options = FORMATS[request.param]
    return encoding, make(tmp_path_factory.mktemp("integers"), **options)


def test_logits_equal_those_of_the_expanded_model(checkpoint: tuple[str, Path]) -> None:
    encoding, folder = checkpoint
    whole = load_reference_model(ModelSkeleton.of(folder / "expanded"))
    assert set(ModelSkeleton.of(folder).catalog.layouts[0].encodings.values()) == {encoding}
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


def test_every_expert_equals_the_expanded_one(checkpoint: tuple[str, Path]) -> None:
    _, folder = checkpoint
    want = load_reference_experts(ModelSkeleton.of(folder / "expanded"), 1)
    got = load_reference_experts(ModelSkeleton.of(folder), 1)
    assert {key: torch.equal(got[key], want[key]) for key in want} == dict.fromkeys(want, True)


@pytest.mark.parametrize("make", [awq, partial(gptq, ordered=True)])
def test_slots_of_a_device_have_the_same_bits(make: Make, tmp_path: Path) -> None:
    folder = make(tmp_path)
    whole = load_reference_model(ModelSkeleton.of(folder / "expanded"))
    with streamed(folder, capacity=2, kernels="eager", fake=True) as model:
        assert_same(model, whole, ids(1, 9))


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 7])
def test_compiled_kernels_have_the_bits_of_the_expanded_model(
    checkpoint: tuple[str, Path], tokens: int
) -> None:
    """One token and several: experts as stored, by the product of their encoding."""
    _, folder = checkpoint
    logits = []
    for source, kernels in ((folder / "expanded", "native"), (folder, "rounded")):
        with streamed(source, capacity=3, kernels=kernels) as model:
            logits.append(model(input_ids=ids(1, tokens), use_cache=False).logits)
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["awq", "gptq, act order", "zero points"])
def test_dense_matrices_stay_as_stored(name: str, tmp_path: Path) -> None:
    _, make, options = FORMATS[name]
    folder = make(tmp_path, **options)
    whole = load_reference_model(ModelSkeleton.of(folder / "expanded"))
    skeleton = ModelSkeleton.of(folder)
    skeleton.keep_dense_encoded()
    model = skeleton.load()
    layer = model.model.layers[0].self_attn
    for part in ("q_proj", "o_proj"):
        matrix, want = (
            stored_matrix(getattr(layer, part)),
            getattr(whole.model.layers[0].self_attn, part),
        )
        assert matrix is not None
        assert torch.equal(matrix.decode(), want.weight)
        assert torch.equal(matrix.rows(1, 3), want.weight[1:4])


@pytest.mark.parametrize("kind", ["same", "int8"])
def test_a_pack_has_the_experts_of_its_source(kind: str, tmp_path: Path) -> None:
    folder = gptq(tmp_path / "model", ordered=True)
    pack(str(folder), tmp_path / "pack", kind)
    source = load_reference_experts(ModelSkeleton.of(folder), 0)
    packed = load_reference_experts(ModelSkeleton.of(tmp_path / "pack"), 0)
    for key, want in source.items():
        near = 0 if kind == "same" else 0.01 * want.float().norm()
        assert (packed[key].float() - want.float()).norm() <= near
    if kind == "same":
        with streamed(folder, capacity=3) as model:
            logits = model(input_ids=ids(1, 5), use_cache=False).logits
        with streamed(tmp_path / "pack", capacity=3) as model:
            assert torch.equal(model(input_ids=ids(1, 5), use_cache=False).logits, logits)


def test_modules_that_are_not_converted_are_plain_by_what_the_file_has(tmp_path: Path) -> None:
    """The config does not say so; experts of one layer are plain, too."""
    folder = awq(tmp_path)
    plain = load_file(folder / "expanded" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    layer = ModelSkeleton.of(folder).catalog.layers[1]
    for name in [name for name in tensors if name.startswith(layer)]:
        del tensors[name]
    tensors |= {name: t for name, t in plain.items() if name.startswith(layer)}
    save_file(tensors, folder / "model.safetensors")
    skeleton = ModelSkeleton.of(folder)
    assert [bool(layout.encodings) for layout in skeleton.catalog.layouts] == [True, False]
    whole = load_reference_model(ModelSkeleton.of(folder / "expanded"))
    with streamed(folder, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(1, 5))


# What can be wrong

UP = "model.layers.0.mlp.experts.1.up_proj"


def without(part: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def other(part: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.{part}"] = change(tensors[f"{UP}.{part}"]).contiguous()

    return spoil


@pytest.mark.parametrize(
    ("make", "spoil", "words"),
    [
        (awq, without("qzeros"), "up_proj.qzeros (qzeros) is missing"),
        (gptq, without("qzeros"), "up_proj.qzeros (qzeros) is missing"),
        (gptq, without("scales"), "up_proj.scales (scales) is missing"),
        (awq, without("qweight"), "its codes model.layers.0.mlp.experts.1.up_proj.qweight are"),
        (gptq, other("scales", lambda t: t.int()), "up_proj.scales have dtype int32"),
        (awq, other("qzeros", lambda t: t.long()), "qzeros has dtype int64, but must have int32"),
        (gptq, other("qweight", lambda t: t.short()), "qweight has dtype int16"),
        (gptq, other("qweight", lambda t: t[:, 1:]), "must have shape [any, 256] to fit"),
        (awq, other("qweight", lambda t: t[0]), "qweight has shape [32], but must have"),
        (awq, other("qzeros", lambda t: t[1:]), "qzeros has shape [3, 32], but must have shape"),
        (gptq, other("qzeros", lambda t: t[:, 1:]), "which does not fit 256 outputs"),
        (gptq, other("scales", lambda t: t[:0]), "without an axis of length 0"),
        (awq, other("qweight", lambda t: t[:-8]), "has shape [256, 120], but must have shape"),
        (partial(gptq, group=48), lambda tensors: None, "which is not a multiple of 48"),
        (partial(awq, group=48), lambda tensors: None, "which is not a multiple of 48"),
        (compressed_integers, without("weight_scale"), "weight_scale are missing"),
        (compressed_integers, without("weight_zero_point"), "weight_zero_point is missing, but"),
        (
            compressed_integers,
            other("weight_zero_point", lambda t: t[1:]),
            "must have int32 and [32, 4] to fit",
        ),
        (
            compressed_integers,
            other("weight_zero_point", lambda t: t.to(torch.int8)),
            "weight_zero_point has dtype int8",
        ),
    ],
)
def test_damaged_tensors(tmp_path: Path, make: Make, spoil: Any, words: str) -> None:
    folder = make(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as error:
        ModelSkeleton.of(folder)
    assert str(folder) in one_line(error)
    assert words in one_line(error), one_line(error)


@pytest.mark.parametrize(
    ("make", "changes", "kind", "words"),
    [
        (gptq, {"bits": 2}, UnsupportedModel, "codes of 2 bits"),
        (gptq, {"bits": 3}, UnsupportedModel, "codes of 3 bits"),
        (gptq, {"bits": 8}, CheckpointError, "the config says bits 8, but"),
        (gptq, {"bits": -4}, CheckpointError, "bits is -4, but must be a positive number"),
        (gptq, {"bits": "4"}, CheckpointError, "bits is '4'"),
        (gptq, {"group_size": 64}, CheckpointError, "group_size 64, but"),
        (gptq, {"group_size": -2}, CheckpointError, "group_size is -2, but must be"),
        (gptq, {"group_size": True}, CheckpointError, "group_size is True"),
        (gptq, {"desc_act": "no"}, CheckpointError, "desc_act is 'no', but must be true or false"),
        (gptq, {"checkpoint_format": "marlin"}, UnsupportedModel, "GPTQ in the format marlin"),
        (awq, {"bits": 3}, UnsupportedModel, "form of awq is not supported: codes of 3 bits"),
        (awq, {"group_size": 16}, CheckpointError, "group_size 16, but"),
        (awq, {"version": "gemv"}, UnsupportedModel, "AWQ in the version gemv"),
    ],
)
def test_settings_that_are_wrong_or_not_served(
    tmp_path: Path, make: Make, changes: dict[str, Any], kind: type[ModelError], words: str
) -> None:
    folder = change_settings(make(tmp_path), **changes)
    with pytest.raises(kind) as error:
        ModelSkeleton.of(folder)
    assert str(folder) in one_line(error)
    assert words in one_line(error), one_line(error)


def test_compressed_tensors_that_contradict_their_config(tmp_path: Path) -> None:
    folder = compressed_integers(tmp_path)
    groups = {"weights": {"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True}}
    change_settings(folder, config_groups={"group_0": groups})
    with pytest.raises(CheckpointError, match="is present, but the config says symmetric: true"):
        ModelSkeleton.of(folder)


@pytest.mark.parametrize("group", [-1, 4])
def test_a_group_of_inputs_that_does_not_exist(tmp_path: Path, group: int) -> None:
    """In an expert it is found when the expert arrives, in a dense matrix when it is read."""
    folder = gptq(tmp_path, ordered=True)
    tensors = load_file(folder / "model.safetensors")
    index = tensors[f"{UP}.g_idx"]
    index[3] = group
    save_file(tensors, folder / "model.safetensors")
    with (
        streamed(folder, capacity=8) as model,
        pytest.raises(StoreError, match=rf"the group {group}, but there are 4 groups"),
    ):
        model(input_ids=ids(1, 60), use_cache=False)
    index[3], dense = 0, "model.layers.0.self_attn.q_proj.g_idx"
    tensors[dense][5] = group
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"q_proj.weight: .* the group {group}, but"):
        ModelSkeleton.of(folder).load()
