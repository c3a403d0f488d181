"""Every kernel of the library has a roofline, and every type of ggml that kernels read."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from greenroom.runtime.encodings import ggml
from greenroom.runtime.kernels.matrix import has_format
from greenroom.runtime.kernels.native.library import library
from tests.benchmarks import harness

pytestmark = [pytest.mark.bench_smoke, pytest.mark.timeout(300)]

NATIVE = harness.FOLDER.parent / "native"
EXPORTED = re.compile(r"^(?:KERNELS\(|EXPORT void )(\w+)", re.MULTILINE)
DTYPES = ("", "_bfloat16", "_float16", "_float32")
# Those that measure the limits, start other kernels, copy their arguments, or serve tests.
WITHOUT = {
    "read_memory", "multiply_floats", "multiply_bytes", "run_stages", "run_measured", "copy_calls",
    "test_await", "test_count", "test_exponentials",
}  # fmt: skip


def test_every_kernel_and_type_of_ggml_has_a_roofline() -> None:
    exported = {
        name for path in NATIVE.glob("*.cpp") for name in EXPORTED.findall(path.read_text())
    }
    names = {library().address(name + dtype): name for name in exported for dtype in DTYPES}
    with harness.as_program(harness.FOLDER / "roofline.py", []), torch.no_grad():
        kernels = importlib.import_module("roofline_kernels")
        cases = list(kernels.all_cases(kernels.QUICK, ("bf16",)))
        timed = {names[case.prepare()[0].address] for case in cases}
        formats = set(kernels.FORMATS)
    assert exported - timed == WITHOUT
    types = {each.name for each in ggml.ENCODINGS if has_format(each.name)}
    assert types - formats == {"gguf_nvfp4_scaled"}  # gguf_nvfp4 with one more scale
    assert all(case.nbytes > 0 and case.operations > 0 for case in cases)
