"""A model's fingerprint: a digest of its config and of its tensors' names and shapes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from greenroom.hf.checkpoint.checkpoint import Checkpoint

IGNORED = {"transformers_version"}  # keys of the config that differ between copies of a model


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a model's fingerprint: 64 hexadecimal digits, independent of machine and sharding.

    It covers config.json and each tensor's name, type, shape and size in the headers; no weight is
    read. So it distinguishes architectures and sizes, but not two trainings of one architecture. A
    pack has the fingerprint of its source, so that traces and predictors of one fit the other.
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
    """Return a config without the keys in which two copies of a model may differ."""
    if isinstance(value, dict):
        return {
            key: _content(inner)
            for key, inner in value.items()
            if key not in IGNORED and not key.startswith("_")
        }
    return [_content(inner) for inner in value] if isinstance(value, list) else value
