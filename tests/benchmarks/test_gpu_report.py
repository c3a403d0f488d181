"""Layers of the GPU report: each encoding has random weights of a useful size."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from greenroom.runtime.kernels.eager import EagerKernel
from tests.benchmarks import harness

NAMES = ("plain", "int8", "int4", "mxfp4", "nvfp4", "fp8", "q8_0", "q4_0", "gguf_mxfp4", "q4_k",
         "q5_k", "q6_k", "iq4_xs")  # fmt: skip


@pytest.fixture(scope="module")
def report() -> tuple[ModuleType, ModuleType]:
    folder = str(harness.FOLDER / "gpu_report")
    before = sys.modules.pop("shapes", None)  # another benchmark's
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("shapes"), importlib.import_module("kernel_layers")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("shapes", None)
        if before is not None:
            sys.modules["shapes"] = before


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_has_outputs_of_a_useful_size(report, name):
    shapes, layers = report
    assert shapes.ENCODINGS == NAMES
    torch.manual_seed(1)
    shape = shapes.SMALL_KERNELS["qwen3-30b-a3b"]
    layer = layers.Layer.make(shape, name, torch.device("cpu"), most=1 << 24)
    x, weights = layers.inputs(shape, 3, torch.device("cpu"))
    with torch.inference_mode():
        out = layers.whole_step(EagerKernel(), layer, x, weights, layers.choices(shape, 3, 1)[0])
    assert out.isfinite().all()
    assert 1e-7 < out.abs().mean() < 1e4


def test_shapes_that_blocks_do_not_divide_are_left_out(report):
    shapes, _ = report
    rows = shapes.encodings(smoke=False)
    assert ("gpt-oss-120b", "mxfp4") in rows
    assert ("gpt-oss-120b", "q4_k") not in rows
    assert ("deepseek-v3", "q4_k") in rows
