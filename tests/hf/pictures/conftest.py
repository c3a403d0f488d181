"""A tiny model that reads pictures, in transformers and streamed from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.hf.pictures.reader import PictureReader
from tests.hf.check.test_parity import streamed
from tests.models import reference
from tests.pictures import picture_checkpoint


@pytest.fixture(scope="session")
def folder() -> Path:
    return picture_checkpoint()


@pytest.fixture(scope="session")
def whole(folder: Path) -> Any:
    """The model in transformers, with all experts in memory."""
    return reference(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    """The model as Greenroom runs it, with a cache smaller than a layer."""
    with streamed(folder, capacity=4, kernels="eager") as model:
        yield model


@pytest.fixture(scope="module")
def reader(model: Any) -> PictureReader:
    return PictureReader(model, context=600, most_tokens=64)
