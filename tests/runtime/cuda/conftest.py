"""Triton's kernels run here in its interpreter, on the CPU; tests/gpu runs them on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.cuda.torch_cuda import gpu, streams  # noqa: F401


@pytest.fixture(autouse=True)
def _bfloat16_as_a_device_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 off where it makes bfloat16 of it; devices round to nearest."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(bits, tl.bfloat16)
        return cast(self, source, target)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)


@pytest.fixture(autouse=True)
def _products_whose_bits_depend_on_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay operands out in rows: NumPy's BLAS sums in an order that depends on their strides."""
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def of_rows(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        for operand in (a, b):
            operand.data = np.ascontiguousarray(operand.data)
        return dot(self, a, b, total, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", of_rows)
