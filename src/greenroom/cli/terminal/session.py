"""The terminal chat: reads the user's lines, writes answers, and runs slash commands.

A line that ends in a backslash continues in the next line. If the input is piped, each line is a
turn of the user, no prompt is printed, and the first error ends the program.
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
    from greenroom.cli.screen.screen import LiveScreen
    from greenroom.server.chat.backend import ChatBackend, Messages, OnDelta, Reply
    from greenroom.server.engine.tokens.reader import AnswerDelta

OpenScreen = Callable[[Callable[[str, bool], None]], "LiveScreen"]

HISTORY_LINES = 1000
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def history_file() -> Path:
    """Return the history file of the terminal chat, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "greenroom" / "chat_history"


class Terminal:
    """Input and output of the terminal chat.

    Lines are edited with a history, and answers are written while they are generated.
    """

    def __init__(self) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self._readline: Any = None
        self._thinking = False

    def __enter__(self) -> Terminal:
        if self.typed:
            with contextlib.suppress(ImportError):  # some Python builds lack readline
                import readline

                self._readline = readline
                with contextlib.suppress(OSError):
                    readline.read_history_file(history_file())
        for stream in (
            sys.stdin,
            sys.stdout,
        ):  # an incomplete character must not end a conversation
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None:
            with contextlib.suppress(OSError):  # the home folder is read-only
                history_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._readline.set_history_length(HISTORY_LINES)
                self._readline.write_history_file(history_file())

    def lines(self) -> Iterator[str]:
        """Iterate over the user's input lines until the input ends.

        Ctrl-C discards the line; a second Ctrl-C in a row raises KeyboardInterrupt, as does the
        first one if the input is not a terminal.
        """
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
                print("\n(press Ctrl-C again, Ctrl-D or type /exit to leave)")
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

    def write(self, delta: AnswerDelta) -> None:
        """Write a part of an answer.

        Reasoning is dimmed on a terminal, and not written to files.
        """
        thinking = bool(delta.reasoning)
        if sys.stdout.isatty() and thinking != self._thinking:
            sys.stdout.write(DIM if thinking else f"{PLAIN}\n")
            self._thinking = thinking
        if not thinking or sys.stdout.isatty():
            sys.stdout.write(_safe(delta.reasoning or delta.text))
        sys.stdout.flush()

    def write_part(self, text: str, reasoning: bool) -> None:
        """Write a part of an answer, which is text or reasoning."""
        from greenroom.server.engine.tokens.reader import AnswerDelta

        self.write(AnswerDelta(reasoning=text) if reasoning else AnswerDelta(text=text))

    def end(self) -> None:
        """End the line of an answer, and the dimmed text."""
        sys.stdout.write((PLAIN if self._thinking else "") + "\n")
        sys.stdout.flush()
        self._thinking = False

    def say(self, text: str) -> None:
        """Print a note about the conversation on standard error."""
        print(text, file=sys.stderr, flush=True)


def _safe(text: str) -> str:
    """Return a text without the control characters that a terminal would obey.

    The text is unchanged if standard output is not a terminal.
    """
    if not sys.stdout.isatty():
        return text
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


class Session:
    """A terminal chat of a user with a model: the conversation so far, and slash commands.

    `open_screen` makes a live screen for an answer; None: the model is not in this process.
    """

    def __init__(
        self,
        talker: ChatBackend,
        terminal: Terminal,
        name: str,
        system: str | None = None,
        open_screen: OpenScreen | None = None,
    ) -> None:
        self._talker, self._terminal = talker, terminal
        self._open_screen, self._live = open_screen, False
        self._system = system
        self._messages: Messages = []
        self._name = name
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats,
            "/cache": self._cache,
            "/live": self._switch_live,
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": self._help,
        }
        self._reset("")

    def run(self) -> None:
        """Answer the user's lines until /exit or the end of the input."""
        if self._terminal.typed:
            self._terminal.say(f"{self._name} · /help lists the commands, Ctrl-D leaves")
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
        name, _, value = line.partition(" ")
        if not name.startswith("/"):
            self._answer(line)
        elif name in self._commands:
            self._commands[name](value.strip())
        else:
            raise UsageError(
                f"there is no command {name[:40]!r}: /help lists the commands; to send the line to"
                " the model, begin it with a space"
            )

    def _answer(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            with self._shown() as write:
                reply = self._talker.answer(self._messages, write)
        except BaseException:
            self._messages.pop()
            self._terminal.end()
            raise
        self._terminal.end()
        if reply.reason == "cancelled" and not self._terminal.typed:
            raise KeyboardInterrupt
        self._messages.append({"role": "assistant", "content": reply.text})
        self._terminal.say(closing_line(reply))

    @contextlib.contextmanager
    def _shown(self) -> Iterator[OnDelta]:
        """Show an answer as text, or on the live screen; return what takes its parts."""
        if not self._live or self._open_screen is None:
            yield self._terminal.write
            return
        with self._open_screen(self._terminal.write_part) as screen:
            yield lambda delta: screen.write(delta.reasoning or delta.text, bool(delta.reasoning))

    def begin_live(self) -> None:
        """Show the live screen during answers, or say why it cannot be shown."""
        from greenroom.cli.screen.screen import NO_TERMINAL, has_terminal

        self._live = has_terminal()
        if not self._live:
            self._terminal.say(NO_TERMINAL)

    def _switch_live(self, value: str) -> None:
        if self._open_screen is None:
            raise UsageError(
                "/live shows a model of this process; a server's model is on its own page"
            )
        if self._live:
            self._live = False
        else:
            self.begin_live()
        self._terminal.say(f"the live screen is {'on' if self._live else 'off'}")

    def _stats(self, value: str) -> None:
        from greenroom.cli.terminal.summary import summary

        self._terminal.say(summary(self._talker.stats()))

    def _cache(self, size: str) -> None:
        if not size:
            raise UsageError("/cache needs a size of the expert cache: /cache 20%, or /cache 2GiB")
        self._terminal.say(f"the expert cache has {self._talker.resize(size):,} slots")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._reset("")

    def _reset(self, value: str) -> None:
        """Begin a new conversation in the same terminal chat."""
        self._messages = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})

    def _help(self, value: str) -> None:
        self._terminal.say(
            "/stats        show requests, tokens, and the expert cache\n"
            "/cache SIZE   resize the expert cache: 20%, or 2GiB\n"
            "/live         show the live screen during answers, or no longer\n"
            "/system TEXT  set the system prompt and begin a new conversation\n"
            "/reset        begin a new conversation\n"
            "/exit         leave, as Ctrl-D does; Ctrl-C stops an answer\n"
            "A line that ends in a backslash continues in the next line."
        )


def closing_line(reply: Reply) -> str:
    """Return the line that follows an answer in the terminal chat: tokens, times and hit ratio."""
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
