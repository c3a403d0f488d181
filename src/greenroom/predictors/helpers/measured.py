"""Measured accuracies of predictors that need a running model, by distance and layer.

`accuracy.json` beside this file is made by `benchmarks/accuracy.py` from recorded predictions of
the demo model. For the first `distance` layers of a token, next-gate predicts in the last layers of
the token before; `learned` predicts them in layer 0 of the same token, and does not predict layer 0
itself. For a model with another number of layers, a layer from `distance` on has the accuracy that
was measured at the same relative depth.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from greenroom.errors import UsageError

MEASURED = ("next-gate", "learned")
FILE = Path(__file__).with_name("accuracy.json")


def measured_accuracy(name: str, distance: int, layers: int) -> NDArray[np.float64]:
    """Return the accuracy of a predictor for each layer, as measured on the demo model.

    layers: the number of layers, which may differ from the demo model's

    UsageError for a distance that was not measured.
    """
    measured = _table()[name]
    if distance not in measured:
        raise UsageError(
            f"the accuracy of {name} was measured at the distances {', '.join(map(str, measured))},"
            f" not {distance}: choose one of these, or give accuracy=A"
        )
    later = measured[distance][distance:]
    result = np.empty(layers)
    for layer in range(layers):
        if layer >= distance:
            share = (layer - distance) / max(1, layers - 1 - distance)
            result[layer] = np.interp(share * (later.size - 1), np.arange(later.size), later)
        else:
            result[layer] = measured[distance][layer]
    return result


def _table() -> dict[str, dict[int, NDArray[np.float64]]]:
    """Read the measured accuracies: predictor -> distance -> accuracy of each layer."""
    accuracy = json.loads(FILE.read_text())["accuracy"]
    return {
        name: {int(distance): np.array(layers) for distance, layers in measured.items()}
        for name, measured in accuracy.items()
    }
