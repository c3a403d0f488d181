"""A scheduler that runs one thread at a time, and decides at each point which one is next.

The threads are real, but only the one that holds the baton runs. It gives the baton away at points:
before every operation on a lock, condition, event, queue, thread or clock (see `primitives`), and
between two lines of the files that are traced. A strategy chooses who is next (see `strategies`),
so a schedule is a list of choices, and the same list gives the same run.

Time is virtual: it stands still while threads run. A timed wait ends when no thread can run, or
when the strategy lets it end earlier. Found are
- deadlocks: no thread can run, and none waits for a time;
- lost wake-ups: only the end of a timed wait lets the threads go on, and it is not a poll;
- livelocks: the threads take more than `MOST_STEPS` steps;
- exceptions that end a thread, and so failed checks.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

MOST_STEPS = 400_000
PATIENCE_S = (
    60.0  # of real time, for one schedule: a thread waits outside of the scheduler's points
)
EARLY_S = 20.0  # of virtual time; only shorter waits may end while threads can run
FAR_S = 1000.0  # and a wait of this length must be ended by a thread
TICK_S = 1e-6  # of virtual time, between two readings of a clock
NEVER = float("inf")

OWN_FILES = {__file__, __file__.replace("scheduler", "primitives")}
here = threading.local()  # `task`: the calling thread's


class Ended(BaseException):
    """The schedule is over: raised in every thread at its next point."""


class Failure(AssertionError):
    """A schedule that found an error; `choices` replays it."""

    choices: tuple[tuple[int, int], ...] = ()


class Deadlock(Failure):
    """No thread can run, and none waits for a time."""


class LostWakeup(Failure):
    """Threads went on only because a wait that is no poll ran out of time."""


class Livelock(Failure):
    """The threads take steps without an end."""


class ThreadFailed(Failure):
    """An exception ended a thread."""


class Task:
    """One thread of a schedule: it runs, or waits for `ready`, until the time `due`."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.done = number, name, False
        self.ready: Callable[[], bool] | None = None  # None: it can run
        self.due, self.since = NEVER, 0.0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ident = 0
        self.thread: Any = None  # as `threading.current_thread` returns it


class Strategy(Protocol):
    """Chooses the next thread at each point."""

    next_line: int  # points between lines are skipped before this step

    def choose(self, step: int, tasks: list[Task], stays: bool, sleeper: Task | None) -> int:
        """Return the index of the task that runs next.

        stays:   whether `tasks[0]` is the task that has run, and could go on
        sleeper: the last of `tasks`, if that waits for a time, which may end now
        """


class Scheduler:
    """Runs the threads of one schedule, as a strategy chooses.

    traced: names of source files, between whose lines threads may change
    polls:  functions whose timed waits may end without a wake-up; `time.sleep` always may
    """

    def __init__(
        self,
        strategy: Strategy,
        traced: frozenset[str] = frozenset(),
        polls: frozenset[str] = frozenset(),
        most_steps: int = MOST_STEPS,
    ) -> None:
        self._strategy, self._traced, self._polls = strategy, traced, polls
        self._most_steps = most_steps
        self._tasks: list[Task] = []
        self._threads: list[threading.Thread] = []
        self._over = _thread.allocate_lock()
        self._over.acquire()
        self.failure: Failure | None = None
        self.step, self._now = 0, 1.0
        self.choices: list[tuple[int, int]] = []  # those that are not 0: (step, index)

    def run(self, main: Callable[[], object]) -> None:
        """Run `main` and the threads that it starts to their ends; raise the failure, if any."""
        collects = gc.isenabled()
        gc.disable()  # finalisers would run at other steps in each run
        try:
            first = self.spawn(main, "main", None)
            first.baton.release()
            if not self._over.acquire(timeout=PATIENCE_S):
                stacks = self._stacks()
                raise Failure(f"a thread waits outside of the scheduler's points:\n{stacks}")
            for thread in self._threads:
                thread.join(PATIENCE_S)
        finally:
            if collects:
                gc.enable()
        if self.failure is not None:
            self.failure.choices = tuple(self.choices)
            raise self.failure

    def spawn(self, target: Callable[[], object], name: str, shown: Any) -> Task:
        """Add a thread, which runs once it is chosen; `shown` is its `current_thread`."""
        task = Task(len(self._threads), name)
        task.thread = shown
        thread = threading.Thread(target=self._run, args=(task, target), name=name, daemon=True)
        self._threads.append(thread)
        self._tasks.append(task)
        thread.start()
        return task

    def _run(self, task: Task, target: Callable[[], object]) -> None:
        task.baton.acquire()
        here.task, here.scheduler, task.ident = task, self, threading.get_ident()
        sys.settrace(self._trace)
        try:
            if self.failure is None:
                target()
        except Ended:
            pass
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            self._fail(ThreadFailed(f"the thread {task.name} ended with\n{text}"), error)
        finally:
            sys.settrace(None)
            task.done = True
            self._tasks.remove(task)
            here.task = None
            if self._tasks:
                self._next(task).baton.release()
            else:
                self._over.release()

    # ---- points, called by the thread that holds the baton

    def point(self) -> None:
        """Let the strategy choose another thread."""
        self._switch(here.task)

    def block(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready` returns true, at most for `timeout` seconds; return its last value.

        `ready` is called in other threads, and changes nothing.
        """
        task: Task = here.task
        task.ready, task.since = ready, self._now
        task.due = NEVER if timeout is None else self._now + max(0.0, timeout)
        try:
            self._switch(task)
        finally:
            task.ready, task.due = None, NEVER
        return ready()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        self._now += TICK_S
        return self._now

    def _switch(self, task: Task) -> None:
        if self.failure is not None:
            raise Ended
        following = self._next(task)
        if following is not task:
            following.baton.release()
            task.baton.acquire()
        if self.failure is not None:
            raise Ended

    def _next(self, task: Task) -> Task:
        """Choose the task that runs next; after a failure, each ends in turn."""
        self.step += 1
        if self.step > self._most_steps and self.failure is None:
            self._fail(Livelock(f"no end after {self.step} steps:\n{self._stacks()}"))
        if self.failure is not None:
            return task if not task.done else self._tasks[0]
        tasks = [t for t in self._tasks if t.ready is None or t.due <= self._now or t.ready()]
        sleeper = min(
            (t for t in self._tasks if t.due < NEVER and t not in tasks),
            key=lambda t: t.due,
            default=None,
        )
        if not tasks:
            if sleeper is None:
                self._fail(Deadlock(f"no thread can run:\n{self._stacks()}"))
                return task if not task.done else self._tasks[0]
            self._check_poll(sleeper)
            self._now = sleeper.due
            return sleeper
        stays = task in tasks
        tasks.sort(key=lambda t: (t.number - task.number) % len(self._threads))
        if sleeper is not None and sleeper.due - sleeper.since >= EARLY_S:
            sleeper = None
        if sleeper is not None:
            tasks.append(sleeper)
        index = self._strategy.choose(self.step, tasks, stays, sleeper)
        if index:
            self.choices.append((self.step, index))
        if (chosen := tasks[index]) is sleeper:
            self._now = max(self._now, chosen.due)
        return chosen

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename in self._traced else None

    def _trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            if self.step + 1 >= self._strategy.next_line:
                self._switch(here.task)
            else:
                self.step += 1
        return self._trace_line

    # ---- failures

    def _fail(self, failure: Failure, cause: BaseException | None = None) -> None:
        if self.failure is None:
            failure.__cause__ = cause
            self.failure = failure

    def _check_poll(self, sleeper: Task) -> None:
        """Fail if a wait that no thread will end is not a poll."""
        name = self._waits_in(sleeper)
        if (name == "sleep" or name in self._polls) and sleeper.due - sleeper.since < FAR_S:
            return
        self._fail(
            LostWakeup(
                f"the wait of {sleeper.due - sleeper.since:.3g} s in {name} is ended by nobody:\n"
                + self._stacks()
            )
        )

    def _waits_in(self, task: Task) -> str:
        """Return the name of the function in which a task waits; "sleep" for `time.sleep`."""
        frame = sys._current_frames().get(task.ident)
        while frame is not None and frame.f_code.co_filename in OWN_FILES:
            if frame.f_code.co_name == "sleep":
                return "sleep"
            frame = frame.f_back
        return "" if frame is None else frame.f_code.co_qualname

    def _stacks(self) -> str:
        frames = sys._current_frames()
        return "\n".join(
            f"{task.name}{' waits' if task.ready is not None else ''}:\n"
            + "".join(traceback.format_stack(frames[task.ident])[-12:])
            for task in self._tasks
            if task.ident in frames
        )
