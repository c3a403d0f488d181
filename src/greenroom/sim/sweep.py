"""Many cells of one trace at once: policies by capacities, on all cores or on a Ray cluster.

A replay is a compiled call that leaves Python's lock alone: such cells run in threads. Those with
prefetching are played event by event, by Python; where they are long enough to pay for it, they run
in processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from typing import Any

import numpy as np

from greenroom.core.cost import Costs
from greenroom.core.pins import Pins
from greenroom.core.scope import Scope, name_of
from greenroom.core.stream import Stream
from greenroom.errors import UsageError
from greenroom.interrupts import end_with_parent
from greenroom.policies import policy
from greenroom.sim.lesser import Lesser
from greenroom.sim.pinned import kept
from greenroom.sim.proactive import proactive
from greenroom.sim.replay import replay
from greenroom.sim.timed import times
from greenroom.trace import Trace, stream

Row = dict[str, Any]
OFF = "off"
LONG = 20_000  # steps: a cell of so many takes as long as a process does to start


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: a policy's name (with options), a capacity in slots, a predictor or `off`."""

    policy: str
    capacity: int
    pin: str = "step"
    prefetch: str = OFF


@dataclass(frozen=True, slots=True)
class Study:
    """What all cells of a sweep share. Prefetching needs costs, and the order `runtime`."""

    trace: Trace
    requests: Stream
    order: str
    scope: Scope = "shared"
    seed: int = 0
    reset: bool = False
    costs: Costs | None = None
    expert_bytes: int = 0
    ahead: int | None = None
    host: int = 0  # slots that keep experts between the two links of the costs
    devices: int = 1  # that the experts are spread over
    split: float | tuple[float, ...] | None = None  # share of an expert that is its top
    lesser: Lesser | None = None  # what misses may be served with
    co_compute: bool = False  # may misses be computed by the host's processor?
    stay: tuple[int, ...] = ()  # experts that stay once they are there, where it is so
    pins: Pins | None = None  # experts of tasks that stay; without costs, in order `runtime`

    @classmethod
    def of(cls, trace: Trace, order: str, limit: int | None = None, **options: Any) -> Study:
        """A trace's first `limit` tokens (all without it) in an order; UnknownName for it."""
        trace = trace if limit is None else trace.head(limit)
        return cls(trace, stream(trace, order), order, **options)

    def run(self, cell: Cell) -> Row:
        """A cell as `--json` prints it; with costs, how long it takes too."""
        chosen = policy(cell.policy)
        how = {"scope": self.scope, "pin": cell.pin, "seed": self.seed, "reset": self.reset}
        timed: dict[str, Any] = {}
        if self.costs is None:
            stay = kept(self.trace, self.requests, self.pins) if self.pins else ()
            done = replay(
                self.requests, self.trace.offsets, cell.capacity, chosen, kept=stay, **how  # type: ignore[arg-type]
            )  # fmt: skip
            requests, misses = done.requests, done.misses
        elif not self._played(cell):
            found = times(
                self.trace, self.requests, cell.capacity, chosen, self.costs, self.expert_bytes,
                **how,  # type: ignore[arg-type]
            )  # fmt: skip
            requests, misses = found.requests, found.misses
            timed = {"prefetch": OFF, **found.as_json()}
        else:
            if cell.pin != "step":
                raise UsageError(
                    "prefetching, splits, misses that get less, a host tier and several devices"
                    " need the experts of a step to be safe: pin step"
                )
            played = proactive(
                self.trace, self.requests, cell.capacity, chosen, self.costs, self.expert_bytes,
                cell.prefetch, ahead=self.ahead, scope=self.scope, seed=self.seed,
                reset=self.reset, host=self.host, devices=self.devices, split=self.split,
                lesser=self.lesser,
                co_compute=self.co_compute, stay=self.stay,
            )  # fmt: skip
            requests, misses = played.times.requests, played.times.misses
            timed = {"prefetch": cell.prefetch, **played.as_json()}
        return {
            "policy": chosen.name,
            "order": self.order,
            "scope": name_of(self.scope),
            "pin": cell.pin,
            "capacity": cell.capacity,
            "requests": requests,
            "misses": misses,
            "miss_ratio": misses / requests if requests else 0.0,
            **timed,
        }

    @property
    def event_by_event(self) -> bool:
        """Whether every cell is played event by event, by policies that know no future."""
        parts = self.split is not None or self.lesser is not None
        return self.host > 0 or self.devices > 1 or parts

    def _played(self, cell: Cell) -> bool:
        """Whether a cell is played event by event."""
        return cell.prefetch != OFF or self.event_by_event

    def warm(self, cell: Cell) -> None:
        """Compile what a cell needs, on a few steps.

        Two threads that compile the same function at once would both do it, and compiling holds
        the GIL: so all is compiled before the threads start.
        """
        if self.costs is not None and self._played(cell):
            few_tokens = self.trace.head(2)
            replace(self, trace=few_tokens, requests=stream(few_tokens, self.order)).run(cell)
            return
        end = min(8, self.requests.layer.size)
        n = int(self.requests.starts[end])
        few = {
            "starts": self.requests.starts[: end + 1],
            **{name: getattr(self.requests, name)[:end]
               for name in ("now", "layer", "token", "request", "prefill")},
            **{name: getattr(self.requests, name)[:n] for name in ("pieces", "rows", "weights")},
        }  # fmt: skip
        replay(
            Stream(**few), self.trace.offsets, cell.capacity, policy(cell.policy),
            scope=self.scope, pin=cell.pin, seed=self.seed, detail=self.costs is not None,
        )  # fmt: skip


def sweep(
    study: Study,
    cells: Sequence[Cell],
    *,
    workers: int | None = None,
    done: Callable[[], object] = lambda: None,
    compiling: Callable[[str, int, int], object] = lambda name, number, of: None,
) -> list[Row]:
    """The cells' rows, in their order; `done` is called after each. Uses all cores by default.

    `compiling` is called before a policy's code is compiled, or read where it was compiled before:
    with its name, how many are compiled, and of how many.

    Long cells with prefetching run in new processes: a script that calls this needs the usual
    `if __name__ == "__main__"`.
    """
    workers = workers or os.cpu_count() or 1
    kinds = {(cell.policy, cell.prefetch): cell for cell in reversed(cells)}
    first = [cell for cell in cells if kinds[cell.policy, cell.prefetch] is cell]
    for number, cell in enumerate(first):
        compiling(cell.policy, number, len(first))
        study.warm(cell)
    played = sum(cell.prefetch != OFF for cell in cells)
    apart = min(workers, played) if study.requests.layer.size >= LONG else 1
    others = active_children()
    pools: list[Executor] = [ThreadPoolExecutor(workers, "greenroom-sweep")]
    try:
        if apart > 1:
            pools.append(ProcessPoolExecutor(apart, get_context("spawn"), _begin, (study,)))
        waiting: dict[Future[Row], int] = {}
        for i, cell in enumerate(cells):
            if apart > 1 and cell.prefetch != OFF:
                waiting[pools[-1].submit(_go, cell)] = i
            else:
                waiting[pools[0].submit(study.run, cell)] = i
        rows: dict[int, Row] = {}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                rows[waiting.pop(future)] = future.result()
                done()
    except Exception:
        _shut(pools)
        raise
    except BaseException:  # nobody waits for the cells that run, which may take minutes
        for process in active_children():
            if process not in others:
                process.kill()
        _shut(pools, wait=False)
        raise
    _shut(pools)
    return [rows[i] for i in range(len(cells))]


def _shut(pools: list[Executor], wait: bool = True) -> None:
    for pool in pools:
        pool.shutdown(wait=wait, cancel_futures=True)


_study: Study  # of a worker process


def _begin(study: Study) -> None:
    """A worker process: the study comes once. An interrupt ends it without a word, and so does the
    end of its parent."""
    global _study
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    _study = study


def _go(cell: Cell) -> Row:
    return _study.run(cell)


def sweep_on_ray(
    study: Study,
    cells: Sequence[Cell],
    address: str,
    done: Callable[[], object] = lambda: None,
) -> list[Row]:
    """The same on a Ray cluster: `address` is `host:port`, `auto`, or `local` for one of its own.

    The trace is sent once; Greenroom must be installed on the nodes. UsageError where there is no
    Ray or no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs the package ray: pip install 'greenroom[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"no Ray cluster at {address}: {error}") from error
    try:
        shared = ray.put(study)
        task = ray.remote(num_cpus=1)(_run)
        waiting = {task.remote(shared, cell): i for i, cell in enumerate(cells)}
        rows: dict[int, Row] = {}
        while waiting:
            ended, _ = ray.wait(list(waiting))
            for each in ended:
                rows[waiting.pop(each)] = ray.get(each)
                done()
    finally:
        ray.shutdown()
    return [rows[i] for i in range(len(cells))]


def _run(study: Study, cell: Cell) -> Row:
    return study.run(cell)


def capacities(text: str, experts: int) -> list[int]:
    """`64,25%`: slots, or a share of all experts, rounded down. UsageError where it cannot be."""
    return [_capacity(item.strip(), experts) for item in text.split(",")]


def _capacity(text: str, experts: int) -> int:
    from fractions import Fraction

    try:
        if text.endswith("%"):
            share = Fraction(text[:-1].strip())
            if not 0 < share <= 100:
                raise UsageError(f"--capacity {text}: a share is above 0% and at most 100%")
            slots = int(share * experts / 100)
            if slots == 0:
                raise UsageError(f"--capacity {text}: of {experts} experts that is less than one")
            return slots
        slots = int(text)
    except (ValueError, ZeroDivisionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--capacity {text!r}: write slots as 64, a share as 25%") from error
    if not 1 <= slots <= experts:
        raise UsageError(f"--capacity {slots}: must be from 1 to all {experts} experts")
    return slots


def names(text: str) -> list[str]:
    """`lru,moe-infinity:matching=request,capacity=50,opt`: an option belongs to the name before."""
    found: list[str] = []
    for item in text.split(","):
        if found and ":" in found[-1] and "=" in item and ":" not in item:
            found[-1] += f",{item.strip()}"
        else:
            found.append(item.strip())
    return found


def counts(trace: Trace) -> list[list[int]]:
    """[layer][expert]: tokens that chose it."""
    return [
        np.bincount(trace.experts[:, layer].reshape(-1), minlength=int(experts)).tolist()
        for layer, experts in enumerate(trace.experts_per_layer)
    ]


def grid(asked: Sequence[int], experts: int, least: int) -> Iterator[int]:
    """Capacities of a curve: those that were asked for, and twelve more up to all experts."""
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    points = {int(share * experts) for share in shares} | set(asked)
    yield from sorted(point for point in points if point >= least)
