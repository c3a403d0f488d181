"""The file of a learned predictor: safetensors with its model's fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import PredictorError
from greenroom.json_file import JsonObject, Malformed, parse, plain
from greenroom.trace import container
from greenroom.trace.container import Tensor

FORMAT = "greenroom.predictor"
VERSION = 1

Tensors = dict[str, NDArray[Any]]


def save(
    path: Path, tensors: Mapping[str, NDArray[Any]], fingerprint: str, about: Mapping[str, Any]
) -> None:
    """A new file, beside and then renamed; `about` is what it says of itself, as JSON."""
    container.write(
        path,
        {name: Tensor(array.dtype, array.shape, [array]) for name, array in tensors.items()},
        {
            "format": FORMAT,
            "version": str(VERSION),
            "fingerprint": fingerprint,
            "about": json.dumps(about),
        },
    )


def load(path: str | os.PathLike[str], fingerprint: str) -> Tensors:
    """The tensors of a predictor of the model with this fingerprint.

    PredictorError, in one line, where the file is missing, damaged, of another version, or was
    trained for another model.
    """
    path = Path(path)
    try:
        tensors, text = container.read(path, "predictor", PredictorError)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise PredictorError(f"{path}: cannot be read: {reason}") from error
    if text.get("format") != FORMAT:
        raise PredictorError(f"{path}: a safetensors file, but not a predictor")
    if text.get("version") != str(VERSION):
        raise PredictorError(
            f"{path}: a predictor of version {plain(text.get('version'))}; this Greenroom reads"
            f" {VERSION}"
        )
    if text.get("fingerprint") != fingerprint:
        raise PredictorError(
            f"{path}: was trained for another model{_named(text)}: train one for this model with"
            " `greenroom train-predictor`"
        )
    return {name: np.array(array) for name, array in tensors.items()}  # the file may go


def _named(text: Mapping[str, str]) -> str:
    try:
        return f" ({plain(JsonObject(parse(text.get('about', ''))).text('model'))})"
    except Malformed:
        return ""
