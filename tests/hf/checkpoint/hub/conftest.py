"""A hub on this machine, and a cache that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer, use

DATA = Path(__file__).parents[3] / "data" / "gguf"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub whose large files are downloaded in parts of 1,000 bytes."""
    monkeypatch.setattr("greenroom.hf.checkpoint.hub.transfer.PART_BYTES", 1000)
    with HubServer().serving() as hub:
        use(monkeypatch, hub, cache)
        yield hub
