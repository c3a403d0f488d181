"""Checkpoints of shapes.py: values of their blocks, their types, and the routing they replay."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import greenroom
from greenroom.config import ZipfConfig
from greenroom.trace import load, save
from greenroom.trace.synth import zipf
from tests.benchmarks import harness

pytestmark = [pytest.mark.bench_smoke, pytest.mark.timeout(600)]
SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite",
          "glm-4.5-air", "kimi-k2")  # fmt: skip
SIZES_GB = {  # of the files that people download, in a type of the same size
    "qwen3-30b-a3b": 17.5, "mixtral-8x7b": 26.5, "gpt-oss-20b": 12.1, "gpt-oss-120b": 63.4,
    "deepseek-v2-lite": 9.5, "glm-4.5-air": 63.0, "kimi-k2": 580.0,
}  # fmt: skip


FORMS = ("gguf", "safetensors")


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    sys.path.insert(0, str(harness.FOLDER))
    try:
        return importlib.import_module("shapes")
    finally:
        sys.path.remove(str(harness.FOLDER))


def test_blocks_have_the_chosen_deviation_and_single_values(shapes: ModuleType) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = sys.modules["shape_blocks"]
    for name in ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"):
        kind, ggml = blocks.KINDS[name], gguf.GGMLQuantizationType[name]
        values = gguf.dequantize(blocks.pool(name, 0.02), ggml)
        assert abs(values.mean()) < 2e-4
        assert values.std() == pytest.approx(0.02, rel=0.5 if name == "MXFP4" else 0.02)
        assert not gguf.dequantize(np.zeros((1, kind.nbytes), np.uint8), ggml).any()
        for place in range(kind.values) if kind.one else ():
            row = gguf.dequantize(blocks.one_hot(name, place, 8.0)[None], ggml)[0]
            assert np.flatnonzero(row).tolist() == [place]
            assert row[place] == pytest.approx(8.0, rel=2e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_a_full_file_has_the_size_of_the_published_one(name: str, shapes: ModuleType) -> None:
    shape = shapes.SHAPES[name]
    routing = shapes.Routing(np.zeros((1024, 1, 1), np.uint8), None, 0.0)
    model, total = shapes.Model(shape, shape.config, routing), 0
    for entry in shapes.entries(shape, shape.config):
        kind = shapes.KINDS[model.gguf_kind(entry)]
        total += kind.size((entry.experts or 1, *entry.shape)) if entry.gguf else 0
    assert total / 1e9 == pytest.approx(SIZES_GB[name], rel=0.04)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in ("qwen3-30b-a3b", "gpt-oss-20b") for form in FORMS),
        *(("qwen3-30b-a3b", kind) for kind in ("Q4_0", "Q8_0", "IQ4_XS", "MXFP4", "BF16")),
    ],
)
def test_tokens_use_the_experts_of_the_recording(
    name: str, form: str, shapes: ModuleType, tmp_path: Path
) -> None:
    top_k = shapes.SHAPES[name].config["num_experts_per_tok"]
    drawn = zipf(ZipfConfig(layers=3, experts=16, top_k=top_k, tokens=256, a=0.5))
    save(drawn, tmp_path / "drawn.trace")
    args = [name, str(tmp_path / "model"), "--tiny", "--layers", "3", "--vocabulary", "1024",
            "--routing", str(tmp_path / "drawn.trace")]  # fmt: skip
    args += ["--format", form] if form in FORMS else ["--type", form]
    path = tmp_path / "model"
    if form != "safetensors":
        path = path.with_suffix(".gguf")
        args[1] = str(path)
    assert harness.run("shapes.py", args) == 0
    model, _ = greenroom.load(str(path), cache="100%", threads=1)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    try:
        tokens = torch.randint(0, 1020, (1, 40), generator=torch.Generator().manual_seed(1))
        answers = model(tokens).logits[0].argmax(-1)
    finally:
        model.greenroom.detach()
    steps = tokens[0].numpy() % 256
    for layer, experts in enumerate(chosen):
        expected = np.sort(drawn.experts[steps, layer])
        assert np.array_equal(np.sort(experts.reshape(40, top_k).numpy()), expected)
    assert answers.tolist() == [(step + 1) % 256 for step in steps.tolist()]


def test_another_models_recording_is_refused(shapes: ModuleType, tmp_path: Path) -> None:
    save(zipf(ZipfConfig(layers=2, experts=16, top_k=3, tokens=8)), tmp_path / "other.trace")
    made = argparse.Namespace(routing=tmp_path / "other.trace", noise=0.0)
    shape = shapes.SHAPES["gpt-oss-20b"]
    with pytest.raises(SystemExit, match=r"2 layers of 16 experts, top-3, but the model has 24"):
        shapes.routing_of(made, shape, shape.config)
    assert load(made.routing).top_k == 3
