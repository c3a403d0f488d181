"""Cosine similarity of the inputs of routers, k layers apart (ProMoE, 2.1, 4.2 and 4.3).

    python benchmarks/similarity.py RECORDING

RECORDING is of `greenroom trace record --gate-inputs`. The similarity is a token's, between the
inputs of the routers of layers i and i + k; the table has means over tokens. Skip-based prediction
(`next-gate:k`) applies the router of layer i + k to the input of layer i.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import table

from greenroom.errors import UsageError
from greenroom.trace import Trace, load


def similarity(trace: Trace, distance: int) -> np.ndarray:
    """Mean cosine similarity of the inputs of layers i and i + distance, for each i."""
    if trace.gate_inputs is None:
        raise UsageError("the recording has no router inputs: record it with --gate-inputs 1")
    unit = trace.gate_inputs.values.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=2, keepdims=True)
    cosines: np.ndarray = (unit[:, :-distance] * unit[:, distance:]).sum(axis=2).mean(axis=0)
    return cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--distances", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    trace, rows = load(args.recording), []
    for distance in args.distances:
        cosines = similarity(trace, distance)
        rows.append((
            str(distance), f"{cosines.mean():.1%}", f"{cosines.min():.1%}", f"{cosines.max():.1%}"
        ))  # fmt: skip
    print(table(("k", "mean over layers", "least", "most"), rows))


if __name__ == "__main__":
    main()
