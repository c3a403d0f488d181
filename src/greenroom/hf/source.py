"""Where a loaded model comes from: its checkpoint, and what loading changed of its settings."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from greenroom.hf.checkpoint import Checkpoint
from greenroom.hf.pack.format import DATA
from greenroom.runtime.stamps import Stamps


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint of a model, as it was when its headers were read.

    dtype:  as `Draft.of` takes it
    stamps: of all files of weights
    """

    checkpoint: Checkpoint
    dtype: str
    stamps: Stamps

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> Source:
        """A checkpoint that was just opened. CheckpointError where a file is gone already."""
        files = checkpoint.files
        if checkpoint.pack is not None:
            files = (*files, str(checkpoint.pack.folder / DATA))
        return cls(checkpoint, dtype, Stamps(files))


class GenerationSettings:
    """A model's generation config as transformers loads it, to be put back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config: Any = deepcopy(getattr(model, "generation_config", None))

    def restore(self, model: Any) -> None:
        """Give the model these settings again."""
        model.generation_config = self._config
