"""Segments without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.hf.kv.stored import StoredBlock
from greenroom.server.engine.prompts.folder import PromptFolder
from greenroom.server.engine.prompts.segment import Segment, checksum

KEY = "0123456789abcdef" * 2
TOKENS = 32  # of a complete segment


def make_segment(
    ids: Any,
    begin: int = 0,
    parent: str = "",
    *,
    key: str = KEY,
    seed: int = 0,
    window: int | None = None,
) -> tuple[Segment, Any]:
    """A segment of two layers, and its keys and values; `window`: tokens of the second's state."""
    own = np.asarray(ids, np.int32)
    blocks = tuple(
        StoredBlock(torch.bfloat16, 2, tokens, 4)
        for tokens in (own.size, own.size, *[own.size if window is None else window] * 2)
    )
    size = sum(block.nbytes for block in blocks)
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return Segment(key, parent, begin, own, blocks, checksum(data)), data


def write_chain(
    folder: PromptFolder, ids: Any, *, seed: int = 0, window: int | None = None
) -> list[Segment]:
    """Write the segments of a sequence, as the store does."""
    chain: list[Segment] = []
    for begin in range(0, len(ids), TOKENS):
        parent = chain[-1].name_digest if chain else ""
        state = window if window is None or begin + TOKENS >= len(ids) else 0
        segment, data = make_segment(
            ids[begin : begin + TOKENS], begin, parent, seed=seed, window=state
        )
        if segment not in folder:
            assert folder.write(segment, data, chain)
        chain.append(segment)
    folder.touch(chain)
    return chain


@pytest.fixture
def open_folder(tmp_path: Path) -> Callable[..., PromptFolder]:
    def make(
        limit: int = 1 << 30, key: str = KEY, windows: Any = (0, 0), name: str = "prompts"
    ) -> PromptFolder:
        return PromptFolder(tmp_path / name, limit, key, TOKENS, windows)

    return make
