"""Ctrl-C ends the process of a command in time, wherever its main thread is.

Python raises KeyboardInterrupt between two bytecodes of the main thread. Three things lose it: a
`__del__` or a callback (of a weak reference, of ctypes), where Python prints the exception and goes
on; a library that catches everything; and a call into C that does not return. The first two destroy
the exception, which `Interrupt` reports, and the watch sends the signal again. The watch is a
thread. The signal wakes it, not the main thread, so that it ends the process in time also while the
main thread is in C.
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
NUDGE_S = 0.1  # then the signal is sent to the main thread once more: another may have taken it
AGAIN_S = 0.3  # within this time a second signal is the same Ctrl-C, which a parent passed on
CHECK_S = 0.02
TIDY_S = 0.2  # for what may wait for a lock
PR_SET_PDEATHSIG = 1  # of prctl(2)
BEGIN, GO_ON = b"\xff\xfe"  # bytes in the pipe, beside the numbers of signals

_undo: list[Callable[[], object]] = []
_watches: list[InterruptWatch] = []  # of this process: one or none


class Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises; it reports that it was destroyed before anybody handled it."""

    def __init__(self, watch: InterruptWatch) -> None:
        super().__init__()
        self.watch: InterruptWatch | None = watch

    def __del__(self) -> None:
        if self.watch is not None:
            self.watch.lost = True


def mark_handled(error: KeyboardInterrupt) -> None:
    """Say that the command goes on: this Ctrl-C was meant for a part of it."""
    if isinstance(error, Interrupt) and error.watch is not None:
        error.watch.go_on()
        error.watch = None


def mark_caught(error: KeyboardInterrupt) -> None:
    """Say that this Ctrl-C has arrived where it ends the command."""
    if isinstance(error, Interrupt):
        error.watch = None


@contextlib.contextmanager
def undo_on_interrupt(undo: Callable[[], object]) -> Iterator[None]:
    """Have `undo` called if the process is ended within: it removes what must not stay."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Have Ctrl-C raised at the end of what must not be left half done; the time to end holds."""
    for watch in _watches:
        watch.defer(True)
    try:
        yield
    finally:
        for watch in _watches:
            watch.defer(False)


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, however that ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class InterruptWatch:
    """The handler of SIGINT of a process that is one command, and the command's time to end."""

    def __init__(self) -> None:
        self.requested = False  # Ctrl-C was pressed, and the command did not go on
        self.lost = False  # the exception was destroyed on its way
        self.announced = False  # the line that says so is printed
        self._raised = self._over = self._nudged = self._deferred = False
        self._sent = 0  # the watch's own signals that are still to come
        self._main = threading.get_ident()
        self._hook = sys.unraisablehook

    def begin(self) -> bool:
        """Take over SIGINT; False where it is ignored, already another's, or not of Linux."""
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
        """See `held`."""
        self._deferred = on
        if not on and self.requested and not self._raised:
            self._on_signal(signal.SIGINT, None)

    def go_on(self) -> None:
        """Stop counting: the command goes on."""
        self.requested = self._raised = self.lost = False
        self._tell(GO_ON)

    def stop_raising(self) -> None:
        """Raise nothing from here on; the time to end holds."""
        self._over = True

    def exit(self) -> NoReturn:
        """End an interrupted process. No thread is joined, and no module torn down that may be
        half imported."""
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
            self._tell(BEGIN)
            self._nudged = False  # the watch asks again until the import is over
            return
        self._raised = True
        self._tell(BEGIN)  # where this is called by another handler
        raise Interrupt(self)

    def _tell(self, byte: int) -> None:
        with contextlib.suppress(OSError):  # a full pipe has been heard
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
        """When the time began that is running now, after what the pipe holds."""
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
        return signal.getsignal(signal.SIGINT) == self._on_signal

    def _send(self) -> None:
        self._sent += 1
        signal.pthread_kill(self._main, signal.SIGINT)

    def _abort(self) -> NoReturn:
        """End the process while its main thread is anywhere, and may hold any lock."""
        _undo_all()
        _kill_children()  # before they notice that nobody is there
        tidy = threading.Thread(target=_give_back_semaphores, daemon=True)
        tidy.start()
        tidy.join(TIDY_S)
        if self._terminal is not None:
            _restore(self._terminal)
        if not self.announced:
            write_now("greenroom: interrupted\n")
        os._exit(INTERRUPTED)


def _importing(name: str) -> bool:
    """Whether a package is being imported: an exception in torch's C++ part aborts the process."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def write_now(text: str) -> None:
    """To standard error, past Python's buffers and their locks; nothing where it would wait."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _undo_all() -> None:
    for undo in reversed(_undo.copy()):
        with contextlib.suppress(Exception):
            undo()


def _give_back_semaphores() -> None:
    """Those of multiprocessing; a process of its own would warn of them when this one has ended."""
    util = sys.modules.get("multiprocessing.util")
    with contextlib.suppress(Exception):
        util._run_finalizers(0)  # type: ignore[union-attr]


def _kill_children() -> None:
    """End child processes, but that of multiprocessing which tidies up after this one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tidying = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            for child in map(int, (task / "children").read_text().split()):
                if child != tidying:
                    os.kill(child, signal.SIGKILL)


def _terminal() -> list[Any] | None:
    """How the terminal behind standard input is set; None where there is none."""
    import termios  # Linux and the like

    try:
        return termios.tcgetattr(0)
    except (OSError, termios.error):
        return None


def _restore(settings: list[Any]) -> None:
    import termios

    with contextlib.suppress(OSError, termios.error):
        termios.tcsetattr(0, termios.TCSANOW, settings)
