"""Fixtures of tests/runtime/cuda: Triton's interpreter rounds and sums as a device does."""

from tests.runtime.cuda.conftest import (
    _bfloat16_as_a_device_rounds_it,
    _products_whose_bits_depend_on_values_alone,
)

__all__ = [
    "_bfloat16_as_a_device_rounds_it",
    "_products_whose_bits_depend_on_values_alone",
]
