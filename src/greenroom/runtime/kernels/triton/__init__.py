"""Triton kernels that compute plain and encoded experts from slots in GPU memory."""

from greenroom.runtime.kernels.triton.kernel import TritonKernel, fallback_reason

__all__ = ["TritonKernel", "fallback_reason"]
