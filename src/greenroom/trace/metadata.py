"""The text that a trace file carries beside its tensors: format, version, labels, meta."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.json_file import JsonObject

FORMAT = "greenroom.trace"
VERSION = 1


def named(labels: Iterable[str]) -> tuple[list[str], NDArray[np.int32]]:
    """(distinct labels by first appearance, the number of each label)."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(label, len(numbers)) for label in labels]
    return list(numbers), np.array(found, np.int32)


def checked_meta(found: JsonObject) -> dict[str, Any]:
    """What a recording says of itself; Malformed where sizes in it are no numbers."""
    for name in ("expert_bytes", "dense_bytes"):
        if found.value(name, None) is not None:
            found.number(name)
    return found.values


def metadata(names: list[str], meta: dict[str, Any], distances: dict[str, int]) -> dict[str, str]:
    """The `__metadata__` of a trace file."""
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "labels": json.dumps(names),
        "meta": json.dumps(meta),
        "predictions": json.dumps(distances),
    }
