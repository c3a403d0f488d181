"""Locks, conditions, events, queues, threads and clocks whose waits are a scheduler's points.

`replaced(...)` puts them in place of `threading`, `queue` and `time` in modules that have imported
these. Outside of a schedule nothing waits: an operation that would have to fails.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.schedules.scheduler import Scheduler, Task, here

EPOCH = 2e9  # date of the virtual time 0: after those of all files


def _task() -> Task | None:
    return getattr(here, "task", None)


def point() -> None:
    """Let another thread run, in a schedule."""
    if _task() is not None:
        here.scheduler.point()


def wait_until(ready: Callable[[], bool], timeout: float | None = None) -> bool:
    """Wait for a condition that other threads make true."""
    if _task() is None:
        if not ready():
            raise RuntimeError("a wait outside of a schedule")
        return True
    scheduler: Scheduler = here.scheduler
    return scheduler.block(ready, timeout)


def _limit(blocking: bool, timeout: float | None) -> float | None:
    if not blocking:
        return 0.0
    return None if timeout is None or timeout < 0 else timeout


class Lock:
    """A `threading.Lock`: any waiting thread may get it."""

    def __init__(self) -> None:
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        point()
        if self._is_locked:
            limit = _limit(blocking, timeout)
            if limit == 0 or not wait_until(lambda: not self._is_locked, limit):
                return False
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        point()

    def locked(self) -> bool:
        point()
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        if self._is_locked or _task() is None or here.scheduler.failure is None:
            self.release()


class RLock:
    """A `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = _task()
        if self._count == 0 or self._owner is not task:
            point()
            if self._count:
                limit = _limit(blocking, timeout)
                if limit == 0 or not wait_until(lambda: not self._count, limit):
                    return False
            self._owner = task
        self._count += 1
        return True

    def release(self) -> None:
        if not self._count or self._owner is not _task():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            point()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        if self._owner is _task() and self._count:
            self.release()
        elif _task() is None or here.scheduler.failure is None:
            raise RuntimeError("cannot release un-acquired lock")

    def _is_owned(self) -> bool:
        return bool(self._count) and self._owner is _task()

    def save(self) -> int:
        """Release a lock completely, for a wait; return what `restore` needs."""
        count, self._count = self._count, 0
        return count

    def restore(self, count: int) -> None:
        self.acquire()
        self._count = count


class Condition:
    """A `threading.Condition`."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: deque[list[bool]] = deque()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *details: object) -> None:
        self._lock.__exit__(*details)

    def wait(self, timeout: float | None = None) -> bool:
        is_notified = [False]
        self._waiters.append(is_notified)
        lock, count = self._lock, 0
        if isinstance(lock, RLock):
            count = lock.save()
        else:
            lock._is_locked = False
        try:
            return wait_until(lambda: is_notified[0], timeout)
        finally:
            if is_notified in self._waiters:
                self._waiters.remove(is_notified)
            if isinstance(lock, RLock):
                lock.restore(count)
            else:
                lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else CLOCK.monotonic() + timeout
        while not (result := predicate()):
            left = None if until is None else until - CLOCK.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, count: int = 1) -> None:
        point()
        for _ in range(min(count, len(self._waiters))):
            self._waiters.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """A `threading.Event`."""

    def __init__(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        point()
        return self._flag

    def set(self) -> None:
        point()
        self._flag = True

    def clear(self) -> None:
        point()
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        return wait_until(lambda: self._flag, timeout)


class Semaphore:
    """A `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not wait_until(lambda: self._value > 0, _limit(blocking, timeout)):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        point()
        self._value += n

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Queue:
    """A `queue.Queue` without a limit, and a `queue.SimpleQueue`."""

    def __init__(self, maxsize: int = 0) -> None:
        assert maxsize == 0, "a queue with a limit is not imitated"
        self._items: deque[Any] = deque()
        self._unfinished = 0

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        point()
        self._items.append(item)
        self._unfinished += 1

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not wait_until(lambda: bool(self._items), _limit(block, timeout)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(False)

    def qsize(self) -> int:
        point()
        return len(self._items)

    def empty(self) -> bool:
        return not self.qsize()

    def task_done(self) -> None:
        point()
        self._unfinished -= 1

    def join(self) -> None:
        wait_until(lambda: not self._unfinished)

    put_nowait = put


class Thread:
    """A `threading.Thread` of a schedule."""

    def __init__(
        self, group: None = None, target: Callable[..., object] | None = None,
        name: str | None = None, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None,
        *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name, self.daemon, self._task = name or "thread", bool(daemon), None

    def start(self) -> None:
        self._task: Task | None = here.scheduler.spawn(self.run, self.name, self)
        point()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    def is_alive(self) -> bool:
        point()
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None, "cannot join thread before it is started"
        wait_until(lambda: task.done, timeout)


def current_thread() -> Any:
    task = _task()
    return threading.current_thread() if task is None else task.thread


class Namespace:
    """A module in whose place some names have other values."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _now() -> float:
    point()
    return 1.0 if _task() is None else here.scheduler.time()


def sleep(seconds: float) -> None:
    """Wait for a time; 0 seconds are a point alone."""
    if seconds > 0 and _task() is not None:
        wait_until(lambda: False, seconds)
    else:
        point()


def _date() -> float:
    return EPOCH + _now()


CLOCK = Namespace(
    time, sleep=sleep, time=_date, monotonic=_now, perf_counter=_now,
    time_ns=lambda: int(_date() * 1e9), monotonic_ns=lambda: int(_now() * 1e9),
    perf_counter_ns=lambda: int(_now() * 1e9),
)  # fmt: skip
THREADS = Namespace(
    threading, Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Semaphore=Semaphore,
    Thread=Thread, current_thread=current_thread,
)  # fmt: skip
QUEUES = Namespace(queue, Queue=Queue, SimpleQueue=Queue)
REPLACEMENTS = {
    threading: THREADS, time: CLOCK, queue: QUEUES, queue.Queue: Queue, queue.SimpleQueue: Queue,
}  # fmt: skip


@contextmanager
def replaced(prefixes: tuple[str, ...]) -> Iterator[None]:
    """Replace the primitives in all loaded modules whose names begin with one of `prefixes`."""
    changed: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefixes) or name.startswith(__package__):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, ModuleType | type) and value in REPLACEMENTS:
                changed.append((module, attribute, value))
                setattr(module, attribute, REPLACEMENTS[value])
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
