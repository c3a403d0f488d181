"""Triton kernels that compute plain and encoded experts from slots in GPU memory."""

from greenroom.runtime.kernels.triton.kernel import fallback_reason
from greenroom.runtime.kernels.triton.triton_kernel import TritonKernel

__all__ = ["TritonKernel", "fallback_reason"]
