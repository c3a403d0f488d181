"""The source of a loaded model: its checkpoint, and stamps that detect changed files."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.pack.format import DATA
from greenroom.runtime.store.stamps import Stamps


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A loaded model's checkpoint, with stamps that detect files changed since loading.

    dtype:  the argument of `ModelSkeleton.of`
    stamps: sizes and times of all weight files
    """

    checkpoint: Checkpoint
    dtype: str
    stamps: Stamps

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> ModelSource:
        """Record a checkpoint and stamps of its files; raise CheckpointError for missing files."""
        files = checkpoint.files
        if checkpoint.pack is not None:
            files = (*files, str(checkpoint.pack.folder / DATA))
        return cls(checkpoint, dtype, Stamps(files))
