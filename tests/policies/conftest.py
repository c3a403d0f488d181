"""Policies' laws are tried on their Python functions; test_compiled compares compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.policies.plain import plain_policies


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run policies as plain Python functions in this test."""
    with plain_policies():
        yield
