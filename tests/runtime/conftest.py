from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.layout import Catalog
from tests.runtime.expert_file import write_experts


@pytest.fixture
def disk(tmp_path: Path):
    """`disk(layers, experts, size)` writes a file of experts, as a catalog."""

    def make(layers: int = 2, experts: int = 4, size: int = 3000) -> Catalog:
        return write_experts(tmp_path, layers, experts, size)

    return make
