"""GGUF files of every ggml type: other types in each layer, each part of an expert, each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.hf.check.verify import verify
from greenroom.hf.checkpoint.gguf_file import ggml_type
from greenroom.hf.model.reference import load_reference_model
from greenroom.hf.model.skeleton import ModelSkeleton
from tests.ggml_blocks import GGML
from tests.gguf_models import write
from tests.hf.check.test_parity import assert_same, ids, streamed

LAYERS = 3
TYPES = tuple(map(ggml_type, GGML))
# The expert matrices of each file's layers have these types, and its dense parts too.
FILES = TYPES[:9], TYPES[9:18], TYPES[18:]
# What a popular repackager's IQ2_XXS file holds.
UD = {
    "blk.0.ffn_down_exps": "IQ3_S",
    "down_exps": "IQ3_XXS",
    "up_exps": "IQ2_XXS",
    "blk.1.ffn_gate_exps": "IQ3_XXS",
    "gate_exps": "IQ2_XXS",
    "attn": "Q8_0",
    "": "Q4_K",
}


def types_of(kinds: tuple[str, ...]) -> dict[str, str]:
    """A type for each matrix, in turn."""
    turn: Iterator[str] = cycle(kinds)
    parts = [f"ffn_{part}_exps" for part in ("gate", "up", "down")]
    parts += [f"attn_{part}." for part in ("q", "k", "v", "output")]
    names = [f"blk.{layer}.{part}" for part in parts for layer in range(LAYERS)]
    return {**{name: next(turn) for name in names}, "": kinds[0]}


@pytest.fixture(scope="module", params=[*map(types_of, FILES), UD], ids=["1", "2", "3", "UD"])
def file(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ggml") / "tiny.gguf", "qwen3_moe", request.param)


def test_the_start_up_line_names_types_without_a_compiled_product(tmp_path: Path) -> None:
    """Experts of the layer are then decoded when they are computed, and stay small in slots."""
    types = {"blk.1.ffn_down_exps": "TQ1_0", "": "Q8_0"}
    path = write(tmp_path / "tiny.gguf", "qwen3_moe", types)
    whole = load_reference_model(ModelSkeleton.of(path))
    with streamed(path, capacity=3, kernels="precise") as model, torch.inference_mode():
        assert model.greenroom.bindings.kernel_description == "precise; eager for tq1_0"
        got, want = (each(input_ids=ids(2, 9)).logits for each in (model, whole))
        # Sums in bfloat16: 3.2 % apart on a processor without AVX-512, else less than 3 %.
        assert (got - want).float().norm() < 0.05 * want.float().norm()


def test_every_type_is_in_a_file() -> None:
    assert sorted(kind for kinds in FILES for kind in kinds) == sorted(TYPES)
    assert all(set(kinds) == set(types_of(kinds).values()) for kinds in FILES)


def test_logits_equal_those_of_the_expanded_model(file: Path) -> None:
    skeleton = ModelSkeleton.of(file)
    whole = load_reference_model(skeleton)
    with streamed(file, capacity=3, kernels="eager") as model:
        assert_same(model, whole, ids(2, 9))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name


def test_default_kernels_keep_their_promise(file: Path) -> None:
    verdict = verify(str(file), "30%", tokens=2, prompt="The")
    assert verdict.identical
    assert verdict.near
