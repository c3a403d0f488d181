"""What tells a model from another: a digest of its config and of its tensors' names and shapes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from greenroom.hf.checkpoint.checkpoint import Checkpoint

OF_THE_FILE = {"transformers_version"}  # says who wrote it; names that begin with _ are paths


def fingerprint(checkpoint: Checkpoint) -> str:
    """64 hexadecimal digits, the same on every machine and however the files are cut into shards.

    Made of config.json's content and of each tensor's name, type, shape and size, as the headers
    say; no weight is read. So it tells architectures and sizes apart, but not two trainings of one
    architecture. A pack has that of the checkpoint it was made from: what is known of the one's
    routing holds for the other.
    """
    if checkpoint.pack is not None:
        return checkpoint.pack.header.source.fingerprint
    tensors = [
        [name, stored.dtype, list(stored.shape), stored.nbytes]
        for name, stored in sorted(checkpoint.tensors.items())
    ]
    content = json.dumps([_content(checkpoint.config), tensors], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _content(value: Any) -> Any:
    """A config without what two copies of a model may differ in."""
    if isinstance(value, dict):
        return {
            key: _content(inner)
            for key, inner in value.items()
            if key not in OF_THE_FILE and not key.startswith("_")
        }
    return [_content(inner) for inner in value] if isinstance(value, list) else value
