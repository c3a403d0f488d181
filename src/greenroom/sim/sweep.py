"""Sweeps: many simulations of one trace in parallel, on all cores or a Ray cluster.

A simulation without prefetching is a compiled call that releases the GIL, so it runs in a thread.
A simulation with prefetching handles events in Python; long ones run in processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from multiprocessing import active_children, get_context

from greenroom.errors import UsageError
from greenroom.interrupts import defer_interrupts, end_with_parent
from greenroom.predictors import OFF
from greenroom.sim.study import Cell, Row, Study

LONG = 20_000  # steps: a cell of this length takes as long as the start of a process


def sweep(
    study: Study,
    cells: Sequence[Cell],
    *,
    workers: int | None = None,
    done: Callable[[], object] = lambda: None,
    compiling: Callable[[str, int, int], object] = lambda name, number, of: None,
) -> list[Row]:
    """Simulate many combinations of policy, capacity and predictor in parallel.

    cells:     the combinations to simulate
    workers:   number of simulations at a time; None: one per core
    done:      called after each simulation
    compiling: called before the code of a policy is compiled or loaded, with (policy, number of
               policies before it, number of all policies)

    Returns one row of results per cell, in their order. Long simulations with prefetching run in
    new processes, so a script that calls this function needs `if __name__ == "__main__"`; those of
    a `Policy` object stay in this process.
    """
    workers = workers or os.cpu_count() or 1
    kinds = {(cell.policy_name, cell.prefetch): cell for cell in reversed(cells)}
    first = [cell for cell in cells if kinds[cell.policy_name, cell.prefetch] is cell]
    for number, cell in enumerate(first):
        compiling(cell.policy_name, number, len(first))
        study.warm(cell)
    played = sum(map(_is_movable, cells))
    processes = min(workers, played) if study.requests.layer.size >= LONG else 1
    others = active_children()
    pools: list[Executor] = [ThreadPoolExecutor(workers, "greenroom-sweep")]
    try:
        waiting: dict[Future[Row], int] = {}
        with defer_interrupts():  # an interrupted start of a process prints an error
            if processes > 1:
                pools.append(
                    ProcessPoolExecutor(processes, get_context("spawn"), _init_worker, (study,))
                )
            for i, cell in enumerate(cells):
                if processes > 1 and _is_movable(cell):
                    waiting[pools[-1].submit(_run_in_worker, cell)] = i
                else:
                    waiting[pools[0].submit(study.run, cell)] = i
        rows: dict[int, Row] = {}
        for future in as_completed(waiting):
            rows[waiting[future]] = future.result()
            done()
    except Exception:
        _shut_down(pools)
        raise
    except BaseException:  # running cells may take minutes: do not wait for them
        for process in active_children():
            if process not in others:
                process.kill()
        _shut_down(pools, wait=False)
        raise
    _shut_down(pools)
    return [rows[i] for i in range(len(cells))]


def _is_movable(cell: Cell) -> bool:
    """Check whether a simulation gains from a process of its own, and its policy can go there."""
    return cell.prefetch != OFF and isinstance(cell.policy, str)


def _shut_down(pools: list[Executor], wait: bool = True) -> None:
    for pool in pools:
        pool.shutdown(wait=wait, cancel_futures=True)


_study: Study  # of a worker process


def _init_worker(study: Study) -> None:
    """Initialise a worker process of a sweep with the trace and options of all simulations.

    The process ends silently at an interrupt, and when its parent ends.
    """
    global _study
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    _study = study


def _run_in_worker(cell: Cell) -> Row:
    return _study.run(cell)


def sweep_on_ray(
    study: Study,
    cells: Sequence[Cell],
    address: str,
    done: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Simulate many combinations of policy, capacity and predictor on a Ray cluster.

    `address` is `host:port`, `auto`, or `local` for a new cluster on this machine. The trace is
    sent once. Greenroom must be installed on the nodes. Returns one row of results per cell, in
    their order. Raises UsageError if Ray is not installed, or no cluster is at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--ray needs the package ray, which is not installed: pip install 'greenroom[ray]'"
        ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(
            f"--ray {address}: cannot connect to a Ray cluster there: {error}"
        ) from error
    try:
        shared = ray.put(study)
        task = ray.remote(num_cpus=1)(_run_on_ray)
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


def _run_on_ray(study: Study, cell: Cell) -> Row:
    return study.run(cell)
