"""The header of a GGUF model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.hf.checkpoint.header import StoredTensor


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF model: the paths of its files, its metadata and tensors."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def path(self) -> Path:
        """Path of the model's first file."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        """GGUF's name of the architecture."""
        return str(self.metadata["general.architecture"])
