"""Plots of simulation results and routing traces, by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from greenroom.sim.simulation import Simulation
from greenroom.study.libraries import load_library
from greenroom.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_misses(results: Simulation, field: str = "miss_ratio", axes: Axes | None = None) -> Axes:
    """Plot a field of simulation results over the cache's capacity, a curve for each policy.

    axes: where to draw; None: a new figure

    Raises UnknownName if the results have no such field.
    """
    curves = results.curves(field)
    axes = _axes(axes)
    for name, (slots, values) in curves.items():
        shares = [100 * n / results.experts for n in slots]
        style = "--" if name == "opt" else "-"  # OPT knows the future
        axes.plot(shares, values, style, marker="o", label=name)
    axes.set(
        xlabel=f"cache capacity in % of {results.experts} experts", ylabel=field.replace("_", " ")
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes


def plot_experts(trace: Trace, axes: Axes | None = None) -> Axes:
    """Plot how often each expert of a routing trace is used.

    A row is a layer. Colours are relative to the mean of the layer, which is 1.

    axes: where to draw; None: a new figure
    """
    axes = _axes(axes)
    uses = np.full((trace.layers, int(trace.experts_per_layer.max())), np.nan)
    counts = trace.uses()
    for layer, (begin, end) in enumerate(zip(trace.offsets, trace.offsets[1:], strict=False)):
        uses[layer, : end - begin] = counts[begin:end] / counts[begin:end].mean()
    image = axes.imshow(uses, aspect="auto", interpolation="nearest", vmin=0)
    axes.set(xlabel="expert", ylabel="layer")
    axes.locator_params(integer=True)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="uses, relative to the layer's mean")
    return axes


def _axes(axes: Axes | None) -> Axes:
    """Return the axes given, or those of a new figure."""
    pyplot = load_library("matplotlib.pyplot", "plots")
    if axes is None:
        _, axes = pyplot.subplots()
    assert axes is not None
    return axes
