"""Triton kernels over slots in device memory: one token and many, plain and encoded experts."""

from greenroom.runtime.kernels.triton.kernel import Triton, unread

__all__ = ["Triton", "unread"]
