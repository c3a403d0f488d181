"""The command line on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from typing import Any

from tests.cli.conftest import START

# A session leader takes the terminal that it is given; tests in a shell's background ignore Ctrl-C.
ON_A_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class PtyProcess:
    """A command on a terminal of its own, of 24 lines of 80 columns.

    `shown` is what it has written since what was waited for last, and `everything` all of it.
    """

    def __init__(self, *argv: object, before: str = "", env: dict[str, str]) -> None:
        self.shown = self.everything = ""
        self.fd, other = pty.openpty()
        self.resize(24, 80)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL + before + START, *map(str, argv)],
            stdin=other, stdout=other, stderr=other, env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip
        os.close(other)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        settings: list[Any] = termios.tcgetattr(self.fd)
        return bool(settings[3] & termios.ECHO)

    def _read(self) -> None:
        text = os.read(self.fd, 65536).decode("utf-8", "replace")
        self.shown += text
        self.everything += text

    def until(self, text: str, seconds: float = 60) -> None:
        """Read until this is shown, after what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, repr(self.shown)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self._read()
                except OSError as error:  # the terminal goes with its process
                    raise AssertionError(f"{text!r} is not in {self.everything!r}") from error
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, key: str, text: str) -> None:
        """A key until this is shown: while a prompt begins, one is lost (to a user too)."""
        end = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < end, repr(self.shown)
            self.type(key)
            with suppress(AssertionError):
                self.until(text, 5)
                return

    def wait(self) -> int:
        with suppress(OSError):  # the terminal goes with its process
            while True:
                self._read()
        os.close(self.fd)
        return self.process.wait()
