"""Render chat templates in a separate process with limits on time and memory.

    with closing(Templates()) as templates:
        text = templates.chat(tokenizer, messages)

The text is that of `tokenizer.apply_chat_template`. A template that loops, writes without end or
takes too much memory raises a UsageError of one line, and the next rendering starts a new process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greenroom.errors import UsageError
from greenroom.hf.text import template_worker

CPU_S = 2  # CPU seconds of one rendering
WALL_S = 10.0  # seconds until an answer, on a busy machine
MOST_CHARS = 4 << 20
BASE_BYTES = 64 << 20  # address space of the process, most of it never touched
CHAR_BYTES = 24  # for each character of a result: its pieces, copies and encoding
REASONING = ("reasoning_content", "thinking", "reasoning")  # clients' names for it, first to last
END = "GREENROOM_RESUMES_HERE "  # templates that trim contents drop the space

Messages = list[dict[str, Any]]


class Templates:
    """Renderer of chat templates in a separate process, to at most `most_chars` characters.

    The object may be shared between threads. The process starts at the first rendering.
    """

    def __init__(self, most_chars: int = MOST_CHARS) -> None:
        self.most_chars = min(most_chars, MOST_CHARS)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link = socket.socket()  # to the process
        self._end: Any = None  # ends the process, at the latest with ours

    def close(self) -> None:
        """End the process that renders chat templates; the next rendering starts another."""
        with self._lock:
            self._end_process()

    def chat(
        self,
        tokenizer: Any,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        resume: bool = False,
        ends: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation by the model's chat template, as a prompt text.

        The text ends where the model's answer begins. With `resume`, the answer continues the last
        message. With `ends`, the conversation ends with its last message. `variables` are passed
        to the template. Raises UsageError if the template fails on the conversation.
        """
        if not messages:
            raise UsageError("the conversation has no messages: give at least one")
        try:
            template = tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise UsageError(
                f"no chat template of the model fits this conversation: {error}"
            ) from error
        turns = [_template_message(message) for message in messages]
        if resume:
            _mark(turns[-1], template)
        text = self.render(
            template,
            {
                "messages": turns,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": not (resume or ends),
                **tokenizer.special_tokens_map,
                **variables,
            },
        )
        return _text_before_mark(text, str(messages[-1]["content"])) if resume else text

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render a chat template with these variables.

        Raises UsageError if the template fails or needs too much time or memory, and if a variable
        cannot be written as JSON.
        """
        try:
            request = json.dumps([template, variables, self.most_chars], default=_to_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"the messages, tools or template variables cannot be written as JSON ({error}):"
                " use texts as keys, and nest values less deeply and without cycles"
            ) from None
        with self._lock:
            try:
                done, last, text = self._answer(f"{request}\n".encode())
            except BaseException:
                self._end_process()
                raise
            if last:
                self._end_process()
        if not done:
            raise _refusal(" ".join(text.split())[:200])
        return text

    def _answer(self, request: bytes) -> tuple[bool, bool, str]:
        process = self._process
        if process is None or process.poll() is not None:
            self._end_process()
            self._start()
        try:
            self._link.sendall(request)
            with self._link.makefile(encoding="utf-8", errors="surrogatepass") as answers:
                done, last, text = json.loads(answers.readline())
                return done, last, text
        except TimeoutError:
            raise _refusal(f"rendering takes longer than {WALL_S:g} seconds") from None
        except (json.JSONDecodeError, ConnectionError):
            # The kernel ends a process beyond its limits; nothing else is expected to.
            raise _refusal(
                f"rendering takes more than {CPU_S} CPU seconds, or too much memory"
            ) from None

    def _start(self) -> None:
        script = str(Path(template_worker.__file__))
        path = [each for each in sys.path if each and Path(each) != Path(script).parent]
        options = map(str, (script, BASE_BYTES + CHAR_BYTES * self.most_chars, CPU_S, *path))
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", *options], stdin=end, stdout=end,
                stderr=subprocess.DEVNULL, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )  # fmt: skip
        ours.settimeout(WALL_S)
        self._process, self._link = process, ours
        self._end = weakref.finalize(self, _kill, process, ours)

    def _end_process(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _refusal(why: str) -> UsageError:
    return UsageError(f"the model's chat template fails on these messages: {why}")


def _kill(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    process.kill()
    link.close()
    process.wait()


def _template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to the form in which transformers passes it to chat templates.

    The result has no fields that are None, and has the message's reasoning under both names that
    templates read.
    """
    if not isinstance(message, Mapping):
        raise UsageError(
            f"each message must be an object with a role and a content, got {message!r:.60}"
        )
    turn = {key: one for key, one in message.items() if one is not None}
    reasoning = next((turn[name] for name in REASONING if name in turn), None)
    if reasoning is None:
        return turn
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _to_json(value: Any) -> Any:
    """Convert an object that JSON lacks to the value that chat templates get instead."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _mark(last: dict[str, Any], template: str) -> None:
    """Mark the end of the last message, where the model's answer continues."""
    if not isinstance(last.get("content"), str) or "content" not in template:
        raise UsageError(
            "the last message cannot be continued: its content is not a text that the model's chat"
            " template writes"
        )
    last["content"] += END


def _text_before_mark(text: str, content: str) -> str:
    """Return a rendered text up to the mark END, without spaces that the template trims."""
    at = text.rfind(END.strip())
    if at < 0 or content.strip() not in text:
        raise UsageError(
            "the last message cannot be continued: the model's chat template changes its text"
        )
    return text[:at] if text.startswith(END, at) else text[:at].rstrip()
