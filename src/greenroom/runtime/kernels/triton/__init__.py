"""Triton kernels over slots in device memory: one token and many, plain and encoded experts."""

from greenroom.runtime.kernels.triton.kernel import TritonKernel, fallback_reason

__all__ = ["TritonKernel", "fallback_reason"]
