"""Triton's kernels, compiled without a GPU, against the limits of their machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton

from tests.offline_gpu.examine import excesses
from tests.offline_gpu.launches import ALL
from tests.offline_gpu.limits import exceptions


@pytest.mark.offline_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoding", ALL)
def test_machine_code_is_within_its_limits(encoding):
    """Getting worse than an exception fails, and so does an exception that nothing needs."""
    assert not triton.knobs.runtime.interpret, "run it by make check-gpu-offline"
    found, allowed = excesses(encoding), exceptions()
    worse = {key: value for key, value in found.items() if value > allowed.get(key, 0)}
    assert not worse, "above the limit, or above the exception in exceptions.txt"
    unneeded = {key for key in allowed if key[0] == encoding} - set(found)
    assert not unneeded, "within the limit: delete it from exceptions.txt"


def test_exceptions_are_of_encodings():
    assert {encoding for encoding, _, _ in exceptions()} <= {*ALL}
