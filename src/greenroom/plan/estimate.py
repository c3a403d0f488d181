"""Estimates of a setting's speed, with a range, by simulating a workload on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.config import SchedulerConfig, scope_of, split_of
from greenroom.core.cache.state import group_sizes
from greenroom.core.config.base import EXPERTS
from greenroom.core.config.scheduler import NO_OPTIONS, option_names, with_options
from greenroom.core.cost import Costs
from greenroom.core.stream import Stream
from greenroom.core.transfers.tiers import least_host_slots
from greenroom.errors import BudgetError, UsageError
from greenroom.plan.model import Model
from greenroom.plan.settings import AUTO, OFF, Setting
from greenroom.plan.workload import Workload
from greenroom.policies import choose, policy
from greenroom.sim.approximation import CopySizes, check_weights
from greenroom.sim.event_driven import EventOptions, simulate_events, split_pieces
from greenroom.sim.foresight import automatic_predictor, resolve_predictor
from greenroom.sim.timed import SimulatedTimes, time_trace
from greenroom.trace import Trace, stream

Floats = NDArray[np.float64]
BAND = 0.25  # half-width of the range, which should cover nine runs in ten: benchmarks/plan.py
UNMEASURED = 0.35  # the same where no run of this model has been measured on the machine
# The accuracy is that of next-gate on recordings (docs/prefetch.md).
ASSUMED_PREDICTOR = "noisy-oracle:1,accuracy=0.8"
EVENT_PASSES = 192  # decode passes simulated event by event, at tens of microseconds an event


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated speed of one setting at one cache capacity, in seconds and bytes.

    setting:     eviction policy, prefetching and other options of a run
    capacity:    slots of the expert cache
    memory:      memory budget with which a run has `capacity` slots
    tpot:        mean time per output token
    low, high:   range in which a measured TPOT is expected
    ttft:        median time to the first token; None if the workload has no prompts
    miss_ratio:  share of expert requests that miss
    token_bytes: bytes of experts read for each token
    stall:       share of the time spent waiting for experts
    gaps:        time of every decode pass of the workload's first trace
    """

    setting: Setting
    capacity: int
    memory: int
    tpot: float
    low: float
    high: float
    ttft: float | None
    miss_ratio: float
    token_bytes: float
    stall: float
    gaps: Floats

    @property
    def ttft_range(self) -> tuple[float, float]:
        """Return the range (low, high) of the time to the first token, in seconds.

        It is relatively as wide as the range of the time per output token.
        """
        assert self.ttft is not None
        return self.ttft * self.low / self.tpot, self.ttft * self.high / self.tpot

    def as_json(self) -> dict[str, Any]:
        return {
            **self.setting.options(),
            "flags": self.setting.flags(),
            "capacity": self.capacity,
            "tpot_s": self.tpot,
            "tpot_low_s": self.low,
            "tpot_high_s": self.high,
            "ttft_s": self.ttft,
            "miss_ratio": self.miss_ratio,
            "bytes_per_token": self.token_bytes,
            "stall_share": self.stall,
        }


class Estimator:
    """Estimator of settings' speed for one model, machine and workload.

    Each estimate is computed once, and cached.
    """

    def __init__(
        self,
        model: Model,
        costs: Costs,
        workload: Workload,
        *,
        measured: bool = False,
        precision: str = OFF,
        low_below: float | None = None,
        host: int = 0,
        co_compute: bool = False,
        warm: bool = False,
        devices: int = 1,
        placement: str = EXPERTS,
    ) -> None:
        """Prepare to simulate a workload on a machine with given costs.

        measured:   whether the costs come from runs of this model on this machine
        precision:  precision of the low-precision copies of experts that may serve misses, or off
        low_below:  tail weight (gate weight of the lower ranks) below which a copy serves a miss
        host:       experts that host memory caches between disk and GPU
        co_compute: whether to also compare settings that compute misses in host memory
        warm:       whether TPOT leaves out the workload's first half, in which caches are filled
        devices:    number of equal GPUs that have the experts, and `placement`: which each has

        UsageError if `precision` is not off and the workload has no gate weights, or if copies are
        nested and experts are cached in host memory.
        """
        if precision != OFF and model.nested and host:
            raise UsageError(
                "--miss-precision with a pack of int8 experts that contain their copies works"
                " without host memory only: use a pack with separate copies (--experts same), or"
                " plan for the CPU"
            )
        self.host, self.co_compute, self.warm = host, co_compute, warm
        self.devices, self.placement = devices, placement
        self.model, self.costs, self.workload = model, costs, workload
        self.band = BAND if measured else UNMEASURED
        self.precision, self.low_below = precision, low_below
        if precision != OFF:
            for trace in workload.traces:
                check_weights(trace)
        self._streams = [stream(trace, "runtime") for trace in workload.traces]
        self._estimates: dict[tuple[Setting, int, bool], Estimate] = {}

    def of(self, setting: Setting, capacity: int, bracket: bool = True) -> Estimate:
        """Estimate the speed of a setting at a cache capacity.

        With `bracket` all traces of the workload are simulated, and the range covers them. A
        synthetic workload has traces with less and with more local routing.
        """
        if capacity >= self.model.experts:  # there is nothing to evict or to fetch
            setting = Setting("lru", "shared", OFF)
        key = setting, capacity, bracket
        if key not in self._estimates:
            self._estimates[key] = self._estimate(setting, capacity, bracket)
        return self._estimates[key]

    def fits(self, setting: Setting, capacity: int) -> bool:
        """Check that a cache capacity suffices for a setting.

        Every layer or group of slots must get at least one slot.
        """
        scope, shares = scope_of(setting.scope), split_of(setting.split)
        if shares is None:
            return scope == "shared" or capacity >= self.model.layers
        assert not isinstance(shares, str)  # a plan has no `auto` split
        try:
            cut = split_pieces(self.workload.traces[0], self.model.expert_bytes, shares)
            group_sizes(cut, capacity, scope)
        except BudgetError:
            return False
        return not self.host or self.host >= least_host_slots(cut)

    def _estimate(self, setting: Setting, capacity: int, bracket: bool) -> Estimate:
        pairs = list(zip(self.workload.traces, self._streams, strict=True))
        runs = [self._run(setting, capacity, *each) for each in pairs[: None if bracket else 1]]
        mean_gaps = [float(self._latest(run.gaps).mean()) for run, _ in runs]
        (first, tokens), trace = runs[0], self.workload.traces[0]
        return Estimate(
            setting,
            capacity,
            self.model.memory(capacity),
            mean_gaps[0],
            min(mean_gaps) * (1 - self.band),
            max(mean_gaps) * (1 + self.band),
            float(np.median(first.ttft)) if trace.pass_prefill.any() else None,
            first.misses / max(1, first.requests),
            first.bytes_moved / tokens,
            first.stall / max(1e-12, first.seconds),
            first.gaps,
        )

    def _run(
        self, setting: Setting, capacity: int, trace: Trace, steps: Stream
    ) -> tuple[SimulatedTimes, int]:
        """Simulate a setting on a trace: (simulated times, number of tokens).

        `gaps` and `ttft` of the times cover the whole trace. The other figures cover only its
        first tokens, as many as the second value says.
        """
        eviction = choose(setting.policy, capacity, self.model.experts)
        reactive_setting = replace(setting, prefetch=OFF)
        reactive = time_trace(
            trace, steps, capacity, eviction, self._costs(reactive_setting, capacity),
            self.model.expert_bytes,
            scope=scope_of(setting.scope),
        )  # fmt: skip
        result = reactive, trace.tokens
        parts = setting.split != OFF or setting.miss_precision != OFF
        if parts or self.host or self.devices > 1:
            result = self._simulate_events(reactive_setting, capacity, trace, reactive)
        if setting.prefetch == OFF:
            return result
        ahead = self._simulate_events(setting, capacity, trace, result[0])
        guarded = setting.prefetch == AUTO
        return result if guarded and ahead[0].gaps.sum() >= result[0].gaps.sum() else ahead

    def _simulate_events(
        self, setting: Setting, capacity: int, trace: Trace, other: SimulatedTimes
    ) -> tuple[SimulatedTimes, int]:
        """Simulate a trace's first passes event by event, and scale the rest from `other` times."""
        part = trace.head(_tokens_until(trace, EVENT_PASSES))
        name = OFF if setting.prefetch == OFF else self._predictor(setting.prefetch, part)
        shares = split_of(setting.split)
        assert not isinstance(shares, str)  # a plan has no `auto` split
        simulated = simulate_events(
            part, stream(part, "runtime"), capacity, policy(setting.policy),
            self._costs(setting, capacity), self.model.expert_bytes, name,
            EventOptions(
                scope=scope_of(setting.scope), split=shares,
                config=with_options(_config(setting), device_placement=self.placement),
                low=self.model.low, nested=self.model.nested,
                host=self._host_slots(setting), devices=self.devices,
            ),
        ).times  # fmt: skip
        n = simulated.gaps.size
        factor = float(self._latest(simulated.gaps).sum() / self._latest(other.gaps[:n]).sum())
        gaps = np.append(simulated.gaps, other.gaps[n:] * factor)
        ttft = simulated.ttft if self.devices > 1 else other.ttft  # `other` has one device
        return replace(simulated, gaps=gaps, ttft=ttft), part.tokens

    def _costs(self, setting: Setting, capacity: int) -> Costs:
        """Return the costs of a setting, with a cache of this capacity.

        On one device tokens may be one graph if the cache has all experts, else graphs in pieces.
        """
        costs, excluding = self.costs, (setting.prefetch, setting.split, setting.miss_precision)
        if setting.co_compute != OFF:
            costs = replace(costs, miss=costs.shared_miss)
        graph = costs.resident if capacity >= self.model.experts else costs.pieces
        if graph is None or self.devices > 1 or any(each != OFF for each in excluding):
            return costs
        return replace(costs, dense=graph)

    def _latest(self, gaps: Floats) -> Floats:
        """Return the times of decode passes that count: all, or the second half if `warm`."""
        return gaps[gaps.size // 2 :] if self.warm else gaps

    def _host_slots(self, setting: Setting) -> int:
        """Return how many experts host memory caches; copies take a part of the same memory."""
        at = _config(setting).approximation()
        low = 0.0 if at is None else CopySizes.of(at, low=self.model.low).low
        return int(self.host / (1 + low))

    def _predictor(self, prefetch: str, trace: Trace) -> str:
        """Choose the simulated predictor that represents the one of a run.

        Predictions that the trace has recorded are preferred.
        """
        if prefetch == AUTO and self.workload.recorded:
            name = automatic_predictor(trace)
            return name if name != "markov" else ASSUMED_PREDICTOR
        if prefetch == AUTO:
            return ASSUMED_PREDICTOR
        return resolve_predictor(trace, prefetch).name


def _config(setting: Setting) -> SchedulerConfig:
    """Build the scheduler's configuration from a setting."""
    names = option_names()
    chosen = {name: value for name, value in setting.options().items() if name in names}
    return with_options(NO_OPTIONS, **chosen)


def _tokens_until(trace: Trace, passes: int) -> int:
    """Count a trace's tokens up to the end of its first `passes` decode passes."""
    decodes = np.flatnonzero(~trace.pass_prefill)
    last = int(decodes[min(passes, decodes.size) - 1])
    return int(trace.pass_starts[last + 1])
