"""Memory is set aside for models that read pictures, and for no others."""

from __future__ import annotations

from typing import Any

from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.pictures.memory import picture_bytes, tower_bytes, waiting_bytes
from tests.models import cached_tiny
from tests.pictures import picture_checkpoint


def test_memory_grows_with_the_pictures_and_is_none_for_text() -> None:
    model: Any = ModelSkeleton.of(picture_checkpoint()).model
    assert picture_bytes(model, 600, 0, 512) == (0, 0)
    small, large = (picture_bytes(model, 600, tokens, 512) for tokens in (16, 64))
    grown = large.activations - small.activations
    assert grown > tower_bytes(model, 64) - tower_bytes(model, 16) > 0
    assert small.pixels > waiting_bytes(model, 600) == 64 << 20
    text = ModelSkeleton.of(cached_tiny("qwen3_moe")).model
    assert picture_bytes(text, 600, 64, 512) == (0, 0)
