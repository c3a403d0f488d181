"""Many cells of one trace at once: policies by capacities, on all cores or on a Ray cluster.

A replay is a compiled call that leaves Python's lock alone: such cells run in threads. Those with
prefetching are played event by event, by Python; where they are long enough to pay for it, they run
in processes.
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

LONG = 20_000  # steps: a cell of so many takes as long as a process does to start


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
    processes = min(workers, played) if study.requests.layer.size >= LONG else 1
    others = active_children()
    pools: list[Executor] = [ThreadPoolExecutor(workers, "greenroom-sweep")]
    try:
        waiting: dict[Future[Row], int] = {}
        with defer_interrupts():  # a process that is half begun would say so
            if processes > 1:
                pools.append(ProcessPoolExecutor(processes, get_context("spawn"), _begin, (study,)))
            for i, cell in enumerate(cells):
                if processes > 1 and cell.prefetch != OFF:
                    waiting[pools[-1].submit(_go, cell)] = i
                else:
                    waiting[pools[0].submit(study.run, cell)] = i
        rows: dict[int, Row] = {}
        for future in as_completed(waiting):
            rows[waiting[future]] = future.result()
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
