"""Experts and dense matrices in the order of panels: the same bits as in rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import greenroom
from greenroom.hf.attach import attach
from greenroom.runtime.kernels.dense import accelerate
from greenroom.runtime.kernels.dense.stored import encoded_matrices
from tests.gguf_models import write

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
TYPES = {"ffn_down": "Q6_K", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q5_K", "": "Q8_0"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose gate and up projections have two types."""
    return write(tmp_path_factory.mktemp("panels") / "tiny.gguf", "qwen3_moe", TYPES)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def orders(model: Any) -> set[str]:
    """The encodings of which the model has matrices in panels."""
    layouts = model.greenroom.setup.catalog.layouts
    specs = [spec for layout in layouts for spec in layout.tensors]
    specs += [each.spec.parts[0] for each in encoded_matrices(model)]
    return {spec.panels for spec in specs} - {""}


def outputs(path: Path, **options: Any) -> tuple[Any, set[str]]:
    """Logits of a prompt and of tokens one by one, and the encodings in panels."""
    model = greenroom.load(str(path), **options)[0]
    first = model(PROMPT, use_cache=True)
    logits, cache = [first.logits], first.past_key_values
    for token in (3, 1, 4):
        step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        logits.append(step.logits)
    found = orders(model)
    model.greenroom.detach()
    return torch.cat(logits, 1), found


@pytest.mark.parametrize("kernels", ["native", "precise"])
@pytest.mark.parametrize("cache", ["30%", "100%"])
def test_the_order_changes_no_bit(
    path: Path, kernels: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, found = outputs(path, kernels=kernels, cache=cache)
    assert found == {"q4_k", "q5_k", "q6_k", "q8_0"}
    monkeypatch.setattr(attach, "in_kernel_order", lambda setup: setup)
    monkeypatch.setattr(accelerate, "KERNELS", ())
    in_rows, none = outputs(path, kernels=kernels, cache=cache)
    assert none == set()
    assert torch.equal(logits, in_rows)


@pytest.mark.parametrize("options", [{"kernels": "rounded"}, {"kernels": "eager"}])
def test_kernels_that_read_rows_get_rows(path: Path, options: dict[str, str]) -> None:
    assert outputs(path, cache="30%", **options)[1] == set()


def test_experts_that_pass_through_host_memory_stay_in_rows(path: Path) -> None:
    model = greenroom.load(str(path), cache="30%", device="fake")[0]
    assert not any(
        spec.panels for layout in model.greenroom.setup.catalog.layouts for spec in layout.tensors
    )
    model.greenroom.detach()


def test_a_float32_model_computes_from_panels_by_eager_kernels(path: Path) -> None:
    """Compiled kernels leave float32 to eager ones, which see rows."""
    whole = outputs(path, cache="30%", dtype="float32", kernels="eager")[0]
    got, found = outputs(path, cache="30%", dtype="float32")
    assert torch.equal(got, whole), found


def test_the_down_projections_of_gpt_oss_are_arranged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate and up projections alternate row by row, so they stay in rows."""
    path = write(tmp_path / "tiny.gguf", "gpt_oss", {"ffn_down_exps": "Q8_0", "": "Q4_0"})
    logits, found = outputs(path, cache="40%")
    assert "q8_0" in found
    monkeypatch.setattr(attach, "in_kernel_order", lambda setup: setup)
    monkeypatch.setattr(accelerate, "KERNELS", ())
    assert torch.equal(outputs(path, cache="40%")[0], logits)
