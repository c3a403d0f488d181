"""The source of a loaded model: its checkpoint, and whether the files changed since."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.pack.format import DATA
from greenroom.runtime.store.stamps import Stamps


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A loaded model's checkpoint, with a record of the files' sizes and times.

    dtype:  the compute dtype that was asked for, as given to `ModelSkeleton.of`
    stamps: size and modification time of each weight file; `stamps.check` raises CheckpointChanged
            if one of them has changed
    """

    checkpoint: Checkpoint
    dtype: str
    stamps: Stamps

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> ModelSource:
        """Record a checkpoint with the sizes and times of its weight files.

        Raises CheckpointError if a file is missing.
        """
        files = checkpoint.files
        if checkpoint.pack is not None:
            files = (*files, str(checkpoint.pack.folder / DATA))
        return cls(checkpoint, dtype, Stamps(files))
