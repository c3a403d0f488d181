"""What a model costs on a machine: from the machine's profile, or from runs of this very model.

Of a run four figures are kept for each token that was decoded: its seconds, those of them stalled,
the experts that were fetched, and how fast the link delivered while it did. What is no stall, and
does not follow from one (`Costs.wake`), is `base + handling * fetched`: least squares over runs
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

LEAST_SPREAD = 4.0  # fetched experts a token by which runs must differ to tell handling from base
LEAST_BYTES = 8 << 20  # that a link must have carried to tell how fast it is


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """A run, per token decoded: means. `carried` and `busy` are the link's bytes and seconds;
    `predicted` says that a predictor ran beside it."""

    seconds: float
    stall: float
    fetched: float
    carried: float
    busy: float
    predicted: bool = False

    @classmethod
    def from_json(cls, entry: Any, where: str = "a run") -> RunMeasurement:
        """Malformed where it is none."""
        return cls(**JsonObject(entry, where).fields_of(cls))

    def computed(self, wake: float) -> float:
        """Seconds that are no stall, and not longer because of one: what was fetched was waited
        for, each as long as the others."""
        return self.seconds - self.stall - wake * min(self.stall, COOLED * self.fetched)


def machine_costs(
    machine: Machine, model: Model, readers: int = 2, processor: str | None = None
) -> Costs:
    """The costs that the profile says, with as many reads at a time as a run has."""
    dense = model.read_bytes // model.layers
    costs = machine.costs(model.expert_bytes, dense, processor=processor)
    first, *later_links = costs.links
    return replace(costs, links=(replace(first, lanes=readers), *later_links))


def throttled_costs(costs: Costs, limit: float | None, expert_bytes: int) -> Costs:
    """With a first link that is held to so many bytes a second (`--read-limit`).

    A reader waits for its turn, and reads then: each chunk takes both, but turns are waited for
    while other lanes read.
    """
    first, *later_links = costs.links
    if limit is None or limit >= first.bandwidth:
        return costs
    chunk = min(expert_bytes, CHUNK_BYTES)
    throttled = Link(limit, first.latency + chunk / first.bandwidth, first.lanes)
    return replace(costs, links=(throttled, *later_links))


def calibrated_costs(costs: Costs, model: Model, runs: Sequence[RunMeasurement]) -> Costs:
    """The same as runs of this model on this machine have shown it to be; without runs unchanged.

    The base is what a token takes without any miss; all of it but the experts' own work is the
    layers', in the profile's proportion of one token to many.
    """
    reactive_runs = [run for run in runs if not run.predicted] or list(runs)
    if not runs:
        return costs
    fetched = np.array([run.fetched for run in reactive_runs])
    computed = np.array([run.computed(costs.wake) for run in reactive_runs])
    base, handling = _line(fetched, computed, costs.handling)
    costs = replace(costs, handling=handling)
    ahead = _ahead([run for run in runs if run.predicted], base, model, costs)
    experts = model.top_k * model.layers * costs.expert.seconds(1)
    dense_seconds = max(base - experts, 0.1 * base)
    expert = costs.expert
    if base - dense_seconds < experts:  # the profile's experts take longer than all there is
        expert = scale_work(expert, (base - dense_seconds) / experts)
    dense = costs.dense.seconds(1)
    layer = dense_seconds / model.layers
    work = scale_work(costs.dense, layer / dense) if dense > 0 else Work.constant(layer)
    first, *later_links = costs.links
    return replace(
        costs, links=(_link(first, runs), *later_links), expert=expert, dense=work, ahead=ahead
    )


def scale_work(work: Work, factor: float) -> Work:
    """So many times as long."""
    return Work(tuple((tokens, seconds * factor) for tokens, seconds in work.points))


def _line(x: np.ndarray, y: np.ndarray, slope: float) -> tuple[float, float]:
    """(y at 0, slope) of the best line; the given slope where the points do not say, and never one
    that falls."""
    if x.max() - x.min() >= LEAST_SPREAD:
        slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    at = float(np.median(y - slope * x))
    return (at, slope) if at > 0 else (float(np.min(y)), 0.0)


def _ahead(runs: Sequence[RunMeasurement], base: float, model: Model, costs: Costs) -> float:
    """What a predictor takes of each layer: what its runs computed more than fetching explains."""
    more = [run.computed(costs.wake) - base - costs.handling * run.fetched for run in runs]
    return max(0.0, float(np.median(more)) / model.layers) if more else costs.ahead


def _link(link: Link, runs: Sequence[RunMeasurement]) -> Link:
    """As fast as it was while it carried: latencies are in that."""
    rates = [run.carried / run.busy for run in runs if run.carried >= LEAST_BYTES and run.busy > 0]
    return Link(float(np.median(rates)), 0.0, link.lanes) if rates else link
