"""Where a loaded model comes from: its checkpoint, and whether its files are still the same."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.pack.format import DATA
from greenroom.runtime.store.stamps import Stamps


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The checkpoint of a model, as it was when its headers were read.

    dtype:  as `ModelSkeleton.of` takes it
    stamps: of all files of weights
    """

    checkpoint: Checkpoint
    dtype: str
    stamps: Stamps

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> ModelSource:
        """A checkpoint that was just opened. CheckpointError where a file is gone already."""
        files = checkpoint.files
        if checkpoint.pack is not None:
            files = (*files, str(checkpoint.pack.folder / DATA))
        return cls(checkpoint, dtype, Stamps(files))
