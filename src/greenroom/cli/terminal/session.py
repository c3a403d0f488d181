"""The terminal chat: lines in, answers out, and commands that begin with a slash.

What is typed goes on from a line that ends in a backslash. With piped input, each line is a turn,
nothing is asked, and the first error ends the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.errors import GreenroomError, UsageError
from greenroom.interrupts import mark_handled

if TYPE_CHECKING:
    from greenroom.server.chat.backend import Messages, Reply, Talker
    from greenroom.server.engine.tokens.reader import Delta

HISTORY_LINES = 1000
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def history_file() -> Path:
    """Where typed lines are kept: in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "greenroom" / "chat_history"


class Terminal:
    """Reads lines, with history where they are typed; writes answers as they come."""

    def __init__(self) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self._readline: Any = None
        self._thinking = False

    def __enter__(self) -> Terminal:
        if self.typed:
            with contextlib.suppress(ImportError):  # there are Pythons without it
                import readline

                self._readline = readline
                with contextlib.suppress(OSError):
                    readline.read_history_file(history_file())
        for stream in (sys.stdin, sys.stdout):  # half a character must not end a conversation
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None:
            with contextlib.suppress(OSError):  # a home that cannot be written to
                history_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._readline.set_history_length(HISTORY_LINES)
                self._readline.write_history_file(history_file())

    def lines(self) -> Iterator[str]:
        """What the user says, line by line, until the end of the input. Ctrl-C drops a line, a
        second one leaves."""
        dropped = False
        while True:
            try:
                line = self._line("> ")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + self._line(". ")
            except EOFError:
                if self.typed:
                    print()
                return
            except KeyboardInterrupt as error:
                if not self.typed or dropped:
                    raise
                mark_handled(error)
                dropped = True
                print("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
                continue
            dropped = False
            if line.strip():
                yield line

    def _line(self, prompt: str) -> str:
        if self.typed:
            return input(prompt)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def write(self, delta: Delta) -> None:
        """A part of an answer; reasoning is dimmed, and kept out of files."""
        thinking = bool(delta.reasoning)
        if sys.stdout.isatty() and thinking != self._thinking:
            sys.stdout.write(DIM if thinking else f"{PLAIN}\n")
            self._thinking = thinking
        if not thinking or sys.stdout.isatty():
            sys.stdout.write(_safe(delta.reasoning or delta.text))
        sys.stdout.flush()

    def end(self) -> None:
        """The end of an answer."""
        sys.stdout.write((PLAIN if self._thinking else "") + "\n")
        sys.stdout.flush()
        self._thinking = False

    def say(self, text: str) -> None:
        """About the conversation, not of it."""
        print(text, file=sys.stderr, flush=True)


def _safe(text: str) -> str:
    """Without the control characters with which a text could speak to the terminal."""
    if not sys.stdout.isatty():
        return text
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


class Session:
    """One conversation."""

    def __init__(
        self, talker: Talker, terminal: Terminal, name: str, system: str | None = None
    ) -> None:
        self._talker, self._terminal = talker, terminal
        self._system = system
        self._messages: Messages = []
        self._name = name
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats,
            "/cache": self._cache,
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": self._help,
        }
        self._reset("")

    def run(self) -> None:
        """Until /exit, or the end of the input."""
        if self._terminal.typed:
            self._terminal.say(f"{self._name} · /help lists commands, Ctrl-D leaves")
        for line in self._terminal.lines():
            if line.strip() == "/exit":
                return
            try:
                self._take(line)
            except GreenroomError as error:
                if not self._terminal.typed:
                    raise
                self._terminal.say(f"greenroom: {' '.join(str(error).split())}")

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not name.startswith("/"):
            self._answer(line)
        elif name in self._commands:
            self._commands[name](rest.strip())
        else:
            raise UsageError(
                f"there is no command {name[:40]!r}: /help lists them, a space before it sends it"
            )

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            reply = self._talker.answer(self._messages, self._terminal.write)
        except BaseException:
            self._messages.pop()
            self._terminal.end()
            raise
        self._terminal.end()
        if reply.reason == "cancelled" and not self._terminal.typed:
            raise KeyboardInterrupt
        self._messages.append({"role": "assistant", "content": reply.text})
        self._terminal.say(closing(reply))

    def _stats(self, rest: str) -> None:
        from greenroom.cli.terminal.summary import summary

        self._terminal.say(summary(self._talker.stats()))

    def _cache(self, rest: str) -> None:
        if not rest:
            raise UsageError("/cache needs a size: /cache 20%, or /cache 2GiB")
        self._terminal.say(f"{self._talker.resize(rest):,} slots")

    def _set_system(self, rest: str) -> None:
        self._system = rest or None
        self._reset("")

    def _reset(self, rest: str) -> None:
        """Begin anew."""
        self._messages = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})

    def _help(self, rest: str) -> None:
        self._terminal.say(
            "/stats        what the server has done, and what its cache holds\n"
            "/cache SIZE   give the expert cache another size: 20%, or 2GiB\n"
            "/system TEXT  another system prompt, and begin anew\n"
            "/reset        begin anew\n"
            "/exit         leave, as Ctrl-D does; Ctrl-C stops an answer\n"
            "A line that ends in a backslash goes on."
        )


def closing(reply: Reply) -> str:
    """One line: tokens and times."""
    parts = []
    if reply.prompt_tokens is not None and reply.new_tokens is not None:
        reused = f" ({reply.reused_tokens} reused)" if reply.reused_tokens else ""
        parts.append(f"{reply.prompt_tokens} prompt{reused} + {reply.new_tokens} new tokens")
    if reply.ttft_s is not None:
        parts.append(f"TTFT {reply.ttft_s:.2f} s")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.1f} tokens/s")
    if reply.hit_ratio is not None:
        parts.append(f"hit ratio {reply.hit_ratio:.1%}")
    if reply.reason != "stop":
        parts.append(
            {"length": "cut short", "cancelled": "stopped"}.get(reply.reason, reply.reason)
        )
    return f"[{' · '.join(parts)}]"
