"""Fixtures of tests/runtime/cuda, so that Triton's interpreter rounds as a device does."""

from tests.runtime.cuda.conftest import _bfloat16_as_a_device_rounds_it

__all__ = ["_bfloat16_as_a_device_rounds_it"]
