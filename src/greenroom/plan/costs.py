"""Costs of a model on a machine, from the machine's profile or from measured runs.

A run is stored as means for each decoded token: its seconds, its stalled seconds, the experts that
were fetched, and the link's bytes and busy seconds. The time without stalls, and without the slower
computing that follows them (`Costs.wake`), is `base + handling * fetched`; least squares over runs
give both.
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
    """Measured means of a run for each decoded token.

    `carried` and `busy` are the link's bytes and seconds; `predicted` means that a predictor ran.
    """

    seconds: float
    stall: float
    fetched: float
    carried: float
    busy: float
    predicted: bool = False

    @classmethod
    def from_json(cls, entry: Any, where: str = "a run") -> RunMeasurement:
        """Read a run's measurement from JSON. Malformed for other contents."""
        return cls(**JsonObject(entry, where).fields_of(cls))

    def computed(self, wake: float) -> float:
        """Compute a run's seconds a token without stalls and without the slowdown after them.

        It assumes that each fetched expert was waited for, for an equal time.
        """
        return self.seconds - self.stall - wake * min(self.stall, COOLED * self.fetched)


def machine_costs(
    machine: Machine, model: Model, readers: int = 2, processor: str | None = None
) -> Costs:
    """Compute a model's costs from a machine's profile, with a run's number of readers."""
    dense = model.read_bytes // model.layers
    costs = machine.costs(model.expert_bytes, dense, processor=processor)
    first, *later_links = costs.links
    return replace(costs, links=(replace(first, lanes=readers), *later_links))


def throttled_costs(costs: Costs, limit: float | None, expert_bytes: int) -> Costs:
    """Limit the first link's bytes a second (`--read-limit`) in a machine's costs.

    A reader waits for its turn, and reads then: each chunk takes both times, but while one lane
    waits, others read.
    """
    first, *later_links = costs.links
    if limit is None or limit >= first.bandwidth:
        return costs
    chunk = min(expert_bytes, CHUNK_BYTES)
    throttled = Link(limit, first.latency + chunk / first.bandwidth, first.lanes)
    return replace(costs, links=(throttled, *later_links))


def calibrated_costs(costs: Costs, model: Model, runs: Sequence[RunMeasurement]) -> Costs:
    """Fit costs to runs of this model on this machine; unchanged without runs.

    The base is the time of a token without any miss. All of it but the experts' own work is
    attributed to the dense layers, in the profile's proportion of one token to many.
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
    """Multiply all computation times of a machine's costs by a factor."""
    return Work(tuple((tokens, seconds * factor) for tokens, seconds in work.points))


def _fit_line(x: np.ndarray, y: np.ndarray, slope: float) -> tuple[float, float]:
    """Fit a line: (y at 0, slope). The slope is never negative.

    The given slope is used where the points lie too close together.
    """
    if x.max() - x.min() >= LEAST_SPREAD:
        slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    at = float(np.median(y - slope * x))
    return (at, slope) if at > 0 else (float(np.min(y)), 0.0)


def _ahead(runs: Sequence[RunMeasurement], base: float, model: Model, costs: Costs) -> float:
    """Estimate a predictor's seconds for each layer: the time that fetching does not explain."""
    more = [run.computed(costs.wake) - base - costs.handling * run.fetched for run in runs]
    return max(0.0, float(np.median(more)) / model.layers) if more else costs.ahead


def _link(link: Link, runs: Sequence[RunMeasurement]) -> Link:
    """Return a link with the bandwidth measured in runs, which includes latencies."""
    rates = [run.carried / run.busy for run in runs if run.carried >= LEAST_BYTES and run.busy > 0]
    return Link(float(np.median(rates)), 0.0, link.lanes) if rates else link
