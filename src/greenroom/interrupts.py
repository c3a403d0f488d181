"""Ctrl-C ends a command's process within 1.5 seconds, whatever its main thread does.

Python raises KeyboardInterrupt between two bytecodes of the main thread. The exception has no
effect in three cases: in a `__del__` method or a callback (of a weak reference, of ctypes), since
Python prints the exception and goes on; in a library that catches every exception; and during a
call into C that does not return. In the first two cases the exception object is destroyed.
`Interrupt` reports that, and the signal is sent again. In the third case a watch thread, which the
signal wakes, ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # exit code of a process that was interrupted
END_S = 1.5  # from Ctrl-C to the end of the process
NUDGE_S = 0.1  # until the signal is sent to the main thread once more: another may have taken it
AGAIN_S = 0.3  # a second signal within this time is the same Ctrl-C, passed on by a parent
CHECK_S = 0.02
TIDY_S = 0.2  # for clean-up that may wait for a lock
PR_SET_PDEATHSIG = 1  # of prctl(2)
BEGIN, GO_ON = b"\xff\xfe"  # bytes in the pipe; its other bytes are signal numbers

_undo: list[Callable[[], object]] = []
_watches: list[InterruptWatch] = []  # of this process: one or none


class Interrupt(KeyboardInterrupt):
    """KeyboardInterrupt that reports to its `InterruptWatch` if it is destroyed unhandled."""

    def __init__(self, watch: InterruptWatch) -> None:
        super().__init__()
        self.watch: InterruptWatch | None = watch

    def __del__(self) -> None:
        if self.watch is not None:
            self.watch.lost = True


def mark_handled(error: KeyboardInterrupt) -> None:
    """Mark a Ctrl-C as handled: the command goes on, and the process is not ended."""
    if isinstance(error, Interrupt) and error.watch is not None:
        error.watch.go_on()
        error.watch = None


def mark_caught(error: KeyboardInterrupt) -> None:
    """Mark a Ctrl-C as caught by the code that ends the command.

    The process still ends within 1.5 seconds of Ctrl-C.
    """
    if isinstance(error, Interrupt):
        error.watch = None


@contextlib.contextmanager
def undo_on_interrupt(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if Ctrl-C or SIGTERM ends the process before this context is left.

    `undo` typically removes unfinished files. It is not called once the context was left, normally
    or by an exception (which may be KeyboardInterrupt).
    """
    _undo.append(undo)
    main = threading.current_thread() is threading.main_thread()
    free = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if free:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        _undo.remove(undo)
        if free and signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay the KeyboardInterrupt of Ctrl-C until the end of this context.

    The process still ends within 1.5 seconds of Ctrl-C.
    """
    for watch in _watches:
        watch.defer(True)
    try:
        yield
    finally:
        for watch in _watches:
            watch.defer(False)


class _Holder:
    """A handler of SIGINT that only notes signals, for another one that is called later."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler, self.came = handler, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of this context, in the main thread.

    A command's process still ends within 1.5 seconds of Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    holder = _Holder(handler)
    signal.signal(signal.SIGINT, holder)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if holder.came:
            handler(signal.SIGINT, None)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent process ends for any reason."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class InterruptWatch:
    """SIGINT handler that ends the process at most 1.5 seconds after Ctrl-C."""

    def __init__(self) -> None:
        self.requested = False  # Ctrl-C was pressed, and is not handled yet
        self.lost = False  # the exception was destroyed on its way
        self.announced = False  # the message "interrupted" is printed
        self._raised = self._over = self._nudged = self._deferred = False
        self._sent = 0  # the watch's own signals that are still to come
        self._main = threading.get_ident()
        self._hook = sys.unraisablehook

    def begin(self) -> bool:
        """Install the handler of SIGINT (Ctrl-C) and start the watch thread.

        Returns False and changes nothing if SIGINT is ignored or already has a handler, if the
        calling thread is not the main thread, or if the system is not Linux.
        """
        main = threading.current_thread() is threading.main_thread()
        free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not (main and free and sys.platform == "linux"):
            return False
        self._terminal = _terminal()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._watch, name="interrupt-watch", daemon=True).start()
        sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._on_signal)
        _watches.append(self)
        return True

    def defer(self, on: bool) -> None:
        """Begin or end a time in which Ctrl-C raises no exception.

        At its end, the exception is raised if Ctrl-C was pressed during that time.
        """
        self._deferred = on
        if not on and self.requested and not self._raised:
            self._on_signal(signal.SIGINT, None)

    def go_on(self) -> None:
        """Do not end the process after a Ctrl-C that was handled: the command goes on."""
        self.requested = self._raised = self.lost = False
        self._wake(GO_ON)

    def stop_raising(self) -> None:
        """Raise no more exceptions for Ctrl-C, which still ends the process within 1.5 seconds."""
        self._over = True

    def exit(self) -> NoReturn:
        """End an interrupted process at once, with exit code 130.

        Unfinished files are removed, child processes are killed, and functions registered with
        `atexit` run. Threads are not joined. Modules are not torn down, since a module may be half
        imported.
        """
        sys.unraisablehook = lambda info: None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        _undo_all()
        _kill_children()
        atexit._run_exitfuncs()
        os._exit(INTERRUPTED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._over or self._raised:
            return
        self.requested = True
        if self._deferred:
            return
        if _importing("torch"):
            self._wake(BEGIN)
            self._nudged = False  # the watch sends the signal again until the import is over
            return
        self._raised = True
        self._wake(BEGIN)  # another handler may have called this one
        raise Interrupt(self)

    def _wake(self, byte: int) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes the watch as well
            os.write(self._write, bytes([byte]))

    def _unraisable(self, info: Any) -> None:
        if not issubclass(info.exc_type, KeyboardInterrupt):
            self._hook(info)

    # ---- the watch's thread

    def _watch(self) -> None:
        begun: float | None = None
        while True:
            if select.select([self._read], [], [], None if begun is None else CHECK_S)[0]:
                begun = self._read_pipe(begun)
            if begun is None:
                continue
            passed = time.monotonic() - begun
            if passed > END_S:
                self._abort()
            if self.lost:
                self._raised = self.lost = False
                self._send()
            elif passed > NUDGE_S and not self._nudged and not self._raised:
                self._nudged = True
                self._send()

    def _read_pipe(self, begun: float | None) -> float | None:
        """Read the signal pipe; return when the current deadline began, or None."""
        now = time.monotonic()
        for byte in os.read(self._read, 256):
            if byte == GO_ON:
                begun = None
            elif byte == signal.SIGINT and self._sent:
                self._sent -= 1
            elif byte == BEGIN or (byte == signal.SIGINT and self._ours()):
                if begun is not None and byte != BEGIN and now - begun > AGAIN_S:
                    self._abort()
                if begun is None:
                    begun, self._nudged = now, False
        return begun

    def _ours(self) -> bool:
        handler = signal.getsignal(signal.SIGINT)
        while isinstance(handler, _Holder):
            handler = handler.handler
        return handler == self._on_signal

    def _send(self) -> None:
        self._sent += 1
        signal.pthread_kill(self._main, signal.SIGINT)

    def _abort(self) -> NoReturn:
        """End the process from the watch thread, whatever the main thread does."""
        _undo_all()
        _kill_children()  # before they report that this process is gone
        tidy = threading.Thread(target=_release_semaphores, daemon=True)
        tidy.start()
        tidy.join(TIDY_S)
        if self._terminal is not None:
            _restore(self._terminal)
        if not self.announced:
            write_now("greenroom: interrupted\n")
        os._exit(INTERRUPTED)


def _importing(name: str) -> bool:
    """Check that a package is being imported now.

    An exception while torch's C++ part is imported would abort the process.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def write_now(text: str) -> None:
    """Write text to standard error without Python's buffers and locks.

    Nothing is written if that would block.
    """
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _terminate(number: int, frame: FrameType | None) -> None:
    """Undo what is unfinished, and end as SIGTERM does."""
    _undo_all()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _undo_all() -> None:
    for undo in reversed(_undo.copy()):
        with contextlib.suppress(Exception):
            undo()


def _release_semaphores() -> None:
    """Release multiprocessing's semaphores; its resource tracker would warn of them."""
    util = sys.modules.get("multiprocessing.util")
    with contextlib.suppress(Exception):
        util._run_finalizers(0)  # type: ignore[union-attr]


def _kill_children() -> None:
    """Kill child processes, except multiprocessing's resource tracker."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            for child in map(int, (task / "children").read_text().split()):
                if child != tracker:
                    os.kill(child, signal.SIGKILL)


def _terminal() -> list[Any] | None:
    """Return the settings of the terminal behind standard input; None without a terminal."""
    import termios  # Linux and the like

    try:
        return termios.tcgetattr(0)
    except (OSError, termios.error):
        return None


def _restore(settings: list[Any]) -> None:
    import termios

    with contextlib.suppress(OSError, termios.error):
        termios.tcsetattr(0, termios.TCSANOW, settings)
