"""Costs of a model on a machine, from the machine's profile or from measured runs.

A measured run is stored as means over its decoded tokens (the seconds, the seconds spent waiting
for experts, the fetched experts) and the link's total bytes and busy seconds. A token's time
without waits, and without the slower computing after each wait (`Costs.wake`), is modelled as `base
+ handling * fetched`. Least squares over several runs give `base` and `handling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from greenroom.core.cost import CHUNK_BYTES, COOLED, Costs, Link, Work
from greenroom.core.machine import Machine
from greenroom.json_file import JsonObject
from greenroom.plan.model import Model

LEAST_SPREAD = 4.0  # fetched experts a token; runs must differ by it to fit handling and base
LEAST_BYTES = 8 << 20  # bytes that a link must have carried for its speed to be known


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """Measurement of a run, as means over its decoded tokens.

    seconds:   time of a token
    stall:     seconds of it spent waiting for experts
    fetched:   experts that were read for a token
    carried:   bytes that the link moved in the whole run
    busy:      seconds that the link was busy in the whole run
    predicted: whether an expert predictor ran
    """

    seconds: float
    stall: float
    fetched: float
    carried: float
    busy: float
    predicted: bool = False

    @classmethod
    def from_json(cls, entry: Any, where: str = "a run") -> RunMeasurement:
        """Read a run's measurement from JSON; raises Malformed if a field is missing or wrong."""
        return cls(**JsonObject(entry, where).fields_of(cls))

    def computed(self, wake: float) -> float:
        """Compute a run's seconds a token without stalls and without the slowdown after them.

        `wake` is the slowdown for each stalled second. The run is assumed to have waited for every
        fetched expert, equally long.
        """
        return self.seconds - self.stall - wake * min(self.stall, COOLED * self.fetched)


def machine_costs(
    machine: Machine, model: Model, readers: int = 4, processor: str | None = None
) -> Costs:
    """Compute the time costs of a model on a machine from the machine's profile.

    `readers` is the number of threads that read from disk; `processor` names the one that computes
    (default: the profile's first).
    """
    dense = model.read_bytes // model.layers
    costs = machine.costs(model.expert_bytes, dense, processor=processor)
    first, *later_links = costs.links
    costs = replace(costs, links=(replace(first, lanes=readers), *later_links))
    chosen = machine.processor(processor)
    if model.token_graph and chosen.graph_token:
        graph = chosen.graph_layer + chosen.graph_token / model.layers - chosen.layer
        resident = costs.dense.with_single(costs.dense.seconds(1) + graph)
        costs = replace(costs, resident=resident)
    if model.token_graph and chosen.piece_layer:
        piece = chosen.piece_layer - chosen.layer
        pieces = costs.dense.with_single(costs.dense.seconds(1) + piece)
        costs = replace(costs, pieces=pieces)
    return costs


def throttled_costs(costs: Costs, limit: float | None, expert_bytes: int) -> Costs:
    """Return a machine's costs with the disk's speed limited, as by `--read-limit`.

    `limit` is in bytes a second; None changes nothing. A reader waits for the limit and reads after
    that, so a chunk takes both times, but other readers read meanwhile.
    """
    first, *later_links = costs.links
    if limit is None or limit >= first.bandwidth:
        return costs
    chunk = min(expert_bytes, CHUNK_BYTES)
    throttled = Link(limit, first.latency + chunk / first.bandwidth, first.lanes)
    return replace(costs, links=(throttled, *later_links))


def calibrated_costs(costs: Costs, model: Model, runs: Sequence[RunMeasurement]) -> Costs:
    """Fit a machine's costs to measured runs of a model on it; unchanged without runs.

    The fit gives the time of a token without any miss. All of that time except the experts'
    computation is attributed to the dense parts of the layers. The times for several tokens are
    scaled in proportion.
    """
    reactive_runs = [run for run in runs if not run.predicted] or list(runs)
    if not runs:
        return costs
    fetched = np.array([run.fetched for run in reactive_runs])
    computed = np.array([run.computed(costs.wake) for run in reactive_runs])
    base, handling = _fit_line(fetched, computed, costs.handling)
    costs = replace(costs, handling=handling)
    ahead = _ahead([run for run in runs if run.predicted], base, model, costs)
    experts = model.top_k * model.layers * costs.expert.seconds(1)
    dense_seconds = max(base - experts, 0.1 * base)
    expert = costs.expert
    if base - dense_seconds < experts:  # the profile's times are longer than a measured token
        expert = scale_work(expert, (base - dense_seconds) / experts)
    dense = costs.dense.seconds(1)
    layer = dense_seconds / model.layers
    work = scale_work(costs.dense, layer / dense) if dense > 0 else Work.constant(layer)
    first, *later_links = costs.links
    return replace(
        costs, links=(_link(first, runs), *later_links), expert=expert, dense=work, ahead=ahead
    )


def scale_work(work: Work, factor: float) -> Work:
    """Multiply a computation's times, at all numbers of tokens, by a factor."""
    return Work(tuple((tokens, seconds * factor) for tokens, seconds in work.points))


def _fit_line(x: np.ndarray, y: np.ndarray, slope: float) -> tuple[float, float]:
    """Fit a line with a slope of at least 0 to points: (y at 0, slope).

    The argument `slope` is used if the x of the points differ by less than LEAST_SPREAD.
    """
    if x.max() - x.min() >= LEAST_SPREAD:
        slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    at = float(np.median(y - slope * x))
    return (at, slope) if at > 0 else (float(np.min(y)), 0.0)


def _ahead(runs: Sequence[RunMeasurement], base: float, model: Model, costs: Costs) -> float:
    """Estimate the seconds that a predictor adds to each layer, from runs with a predictor."""
    more = [run.computed(costs.wake) - base - costs.handling * run.fetched for run in runs]
    return max(0.0, float(np.median(more)) / model.layers) if more else costs.ahead


def _link(link: Link, runs: Sequence[RunMeasurement]) -> Link:
    """Return a link with the median bandwidth of measured runs, which includes latencies."""
    rates = [run.carried / run.busy for run in runs if run.carried >= LEAST_BYTES and run.busy > 0]
    return Link(float(np.median(rates)), 0.0, link.lanes) if rates else link
