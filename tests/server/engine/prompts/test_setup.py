"""Sizes of segments."""

from __future__ import annotations

import pytest

from greenroom.server.engine.prompts.setup import SEGMENT_BYTES, segment_tokens


@pytest.mark.parametrize(
    ("token_bytes", "tokens"), [(1, 256), (96 << 10, 256), (160 << 10, 128), (5 << 20, 16)]
)
def test_a_segment_has_a_bounded_size(token_bytes: int, tokens: int) -> None:
    assert segment_tokens(token_bytes) == tokens
    assert tokens * token_bytes <= SEGMENT_BYTES or tokens == 16
