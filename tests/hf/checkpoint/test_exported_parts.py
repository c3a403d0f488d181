"""What GPTQ tools write beside matrices: the order of inputs, and biases of zeros."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from greenroom.errors import ModelError
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.hf.conftest import one_line
from tests.integers import change_settings, gptq

Tensors = dict[str, Tensor]
EXPERT = "model.layers.0.mlp.experts.0.down_proj"


def with_biases(tensors: Tensors, value: float = 0, of: str = "") -> None:
    """GPTQModel's layers all have biases."""
    for key in [key for key in tensors if key.endswith(".scales") and of in key]:
        bias = torch.zeros(tensors[key].shape[1], dtype=torch.float16)
        bias[-1] = value
        tensors[key.replace("scales", "bias")] = bias


def turned(tensors: Tensors) -> None:
    key = "model.layers.0.self_attn.q_proj.g_idx"
    tensors[key] = tensors[key].flip(0).contiguous()


def wrong_bias(tensors: Tensors) -> None:
    with_biases(tensors)
    with_biases(tensors, 0.5, EXPERT)


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    path = gptq(folder)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_biases_of_zeros_are_ignored(tmp_path: Path) -> None:
    path = changed(tmp_path, with_biases)
    model = ModelSkeleton.of(path).load()
    assert model.model.layers[0].self_attn.o_proj.bias is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_bias, f"no parameter for the bias {EXPERT}.bias, which is not zero"),
        (turned, "self_attn.q_proj.g_idx has the inputs in another order"),
    ],
)
def test_parts_that_would_be_ignored_wrongly(
    tmp_path: Path, change: Callable[[Tensors], None], words: str
) -> None:
    skeleton = ModelSkeleton.of(changed(tmp_path, change))
    with pytest.raises(ModelError) as error:
        skeleton.load()
    assert words in one_line(error)


def test_act_order_is_no_error(tmp_path: Path) -> None:
    path = gptq(tmp_path, ordered=True)
    assert ModelSkeleton.of(path).load()
    change_settings(path, desc_act=False)
    with pytest.raises(ModelError) as error:
        ModelSkeleton.of(path).load()
    assert "set it to true if" in one_line(error)
