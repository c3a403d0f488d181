"""Fingerprints of models: digests of the config and of tensor names, types and shapes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from greenroom.hf.checkpoint.checkpoint import Checkpoint

IGNORED = {"transformers_version"}  # keys of the config that differ between copies of a model


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a checkpoint's fingerprint: 64 hexadecimal digits.

    The fingerprint is the SHA-256 of the config (without `transformers_version` and keys that begin
    with an underscore) and of each tensor's name, type, shape and size. It does not depend on the
    folder or on the division into files. Weights are not read, so two trainings of one architecture
    have the same fingerprint. A Greenroom pack has the fingerprint of the checkpoint that it was
    made from, so files that were recorded for one are accepted for the other.
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
    """Return a model's config without keys that differ between copies of the model."""
    if isinstance(value, dict):
        return {
            key: _content(inner)
            for key, inner in value.items()
            if key not in IGNORED and not key.startswith("_")
        }
    return [_content(inner) for inner in value] if isinstance(value, list) else value
