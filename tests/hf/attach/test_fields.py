"""Experts of GGUF files in the order of fields, with the CPU in a GPU's place: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.core.config.scheduler import NO_OPTIONS, with_options
from greenroom.hf.attach import attach
from greenroom.hf.memory import devices as places
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.cuda.engine import Engine
from tests.gguf_models import write
from tests.options import needs_option

pytest.importorskip("triton")

PROMPT = torch.tensor([[5, 6, 7]])
# The gate and up projections of gpt-oss alternate row by row.
TYPES = {
    "qwen3_moe": {"ffn_down": "Q6_K", "ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "": "Q8_0"},
    "gpt_oss": {"ffn_down_exps": "IQ4_XS", "": "MXFP4"},
}
FIELDS = {"qwen3_moe": {"q4_0", "q6_k"}, "gpt_oss": {"gguf_mxfp4", "iq4_xs"}}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(places, "engine_for", lambda setup, number=0: Engine())
    with torch.no_grad():
        yield


@contextmanager
def placed(path: Path, dtype: str, **parts: Any) -> Iterator[Any]:
    """A model on the stand-in for a GPU, whose experts are read in chunks."""
    skeleton = ModelSkeleton.of(path, dtype=dtype)
    model: Any = skeleton.load()
    model.greenroom = attach.Greenroom(
        model, ModelSetup(skeleton.catalog, capacity=5, cuda=True, **parts)
    )
    try:
        yield model
    finally:
        model.greenroom.detach()


def logits(path: Path, dtype: str, **parts: Any) -> tuple[torch.Tensor, set[str]]:
    """Logits of a prompt and of one token more; the encodings in the order of fields."""
    with placed(path, dtype, **parts) as model:
        first = model(PROMPT, use_cache=True)
        second = model(torch.tensor([[3]]), past_key_values=first.past_key_values)
        layouts = model.greenroom.setup.catalog.layouts
        found = {spec.fields for layout in layouts for spec in layout.tensors} - {""}
        return torch.cat((first.logits, second.logits), 1), found


@pytest.mark.parametrize("cached", [0, 12])
@pytest.mark.parametrize("name", TYPES)
def test_eager_kernels_see_rows(name: str, cached: int, tmp_path: Path) -> None:
    """Triton's kernel leaves float32 models to eager ones, which read the same slots."""
    path = write(tmp_path / "tiny.gguf", name, TYPES[name])
    want, none = logits(path, "float32", kernels="eager", host_capacity=cached)
    got, found = logits(path, "float32", kernels="triton", host_capacity=cached)
    assert none == set()
    assert found == FIELDS[name]
    assert torch.equal(got, want)


@needs_option("co_compute")
@pytest.mark.parametrize("name", TYPES)
def test_the_host_computes_from_slots_in_the_order_of_files(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", name, TYPES[name])
    parts = {"config": with_options(NO_OPTIONS, co_compute="auto"), "host_capacity": 12}
    want, _ = logits(path, "float32", kernels="eager", host_capacity=12)
    with placed(path, "float32", kernels="triton", **parts) as model:
        for _ in range(2):
            got = model(PROMPT).logits
        assert model.greenroom.stats().co_compute["moved"] > 0
    assert torch.equal(got, want[:, : PROMPT.shape[1]])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", TYPES)
def test_triton_computes_from_fields(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", name, TYPES[name], num_hidden_layers=1)
    token = torch.tensor([[5]])
    with placed(path, "bfloat16", kernels="eager") as model:
        want = model(token).logits
    with placed(path, "bfloat16", kernels="triton", host_capacity=6) as model:
        got = model(token).logits
    assert got.isfinite().all()
    assert (got.float() - want.float()).abs().max() < 0.1 * want.abs().max()
