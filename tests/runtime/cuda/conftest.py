"""Torch's devices, streams and graphs, where there is no GPU."""

from tests.runtime.cuda.torch_cuda import gpu, streams  # noqa: F401
