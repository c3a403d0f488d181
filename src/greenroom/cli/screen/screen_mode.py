"""The terminal while a screen is shown: its second buffer, without cursor and echo.

The terminal is restored at the end, before the process is stopped (Ctrl-Z) or terminated, and when
Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

from greenroom.interrupts import undo_on_interrupt

# The second buffer without a cursor and without line breaks at the right edge, and back.
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
LOCK_S = 0.2  # the longest wait for a thread that writes, which may hang


class ScreenMode:
    """Switches a terminal between its first buffer and a screen.

    begun: number of times that the screen began, each with nothing on it
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, threading.RLock()
        self._undo = contextlib.ExitStack()
        self._echo: list[Any] | None = None
        self._open, self.begun = False, 0

    def enter(self) -> None:
        """Begin a screen; only in the main thread are signals handled."""
        self._undo.enter_context(undo_on_interrupt(self._close))
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._on_stop)
            self._undo.callback(signal.signal, signal.SIGTSTP, signal.SIG_DFL)
        self._begin()

    def leave(self) -> None:
        """Restore the terminal; a second call does nothing."""
        self._close()
        self._undo.close()

    def write(self, text: str) -> None:
        """Write to the screen, if it is shown now."""
        with self._lock:
            if self._open:
                self._file.write(text)
                self._file.flush()

    def _begin(self) -> None:
        with self._lock:
            self._open, self._echo = True, _stop_echo()
            self.begun += 1
            self.write(ENTER)

    def _close(self) -> None:
        with self._locked():
            if self._open:
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                    self.write(LEAVE)
                self._open = False
                _restore(self._echo)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Take the lock; go on without it if a thread that writes hangs."""
        acquired = self._lock.acquire(timeout=LOCK_S)
        try:
            yield
        finally:
            if acquired:
                self._lock.release()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal and stop the process; when it goes on, begin again."""
        self._close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._on_stop)
        self._begin()


def _stop_echo() -> list[Any] | None:
    """Stop the terminal from showing what is typed; return its settings, None without one."""
    try:
        settings = termios.tcgetattr(0)
        quiet = [*settings]
        quiet[3] = settings[3] & ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, quiet)
    except (OSError, termios.error):
        return None
    return settings


def _restore(settings: list[Any] | None) -> None:
    if settings is not None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSANOW, settings)
