"""Records of HTTP requests, and the request log: one line for each."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from greenroom.server.engine.requests import Finished

# Probes and the live page come every few seconds; their usual results are not logged.
QUIET = {("/health", 200), ("/health", 503), ("/metrics", 200), ("/v1/live", 200)}
QUIET_FOLDER = "/page/"  # files of the live page


@dataclass(slots=True)
class RequestRecord:
    """The record of one HTTP request and its answers, for the request log."""

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0  # of all answers
    finished: list[Finished] = field(default_factory=list)
    reason: str | None = None
    body_bytes: int = 0
    model: str | None = None  # where the server has several
    at_end: list[Callable[[], object]] = field(default_factory=list)
    error: str | None = None

    def add_answer(self, finished: Finished) -> None:
        """Add an ended answer to the record of an HTTP request."""
        self.finished.append(finished)
        self.new_tokens += finished.new_tokens

    def release(self) -> None:
        """Call the clean-up functions of a request that has ended."""
        while self.at_end:
            self.at_end.pop()()

    def facts(self) -> dict[str, object]:
        """Return the log record of an HTTP request as JSON values, times in seconds."""
        facts: dict[str, object] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(time.monotonic() - self.began, 4),
        }
        if self.model is not None:
            facts["model"] = self.model
        if self.finished:
            facts |= self._answers()
        if self.error is not None:
            facts["error"] = self.error
        return facts

    def _answers(self) -> dict[str, object]:
        first = [one.ttft_s for one in self.finished if one.ttft_s is not None]
        hits = [one.hit_ratio for one in self.finished if one.hit_ratio is not None]
        rates = [rate for one in self.finished if (rate := tokens_per_s(one)) is not None]
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": max(one.reused_tokens for one in self.finished),
            "new_tokens": self.new_tokens,
            "queued_s": round(min(one.queued_s for one in self.finished), 4),
            "ttft_s": round(min(first), 4) if first else None,
            "tokens_per_s": round(sum(rates), 2) if rates else None,
            "hit_ratio": round(sum(hits) / len(hits), 4) if hits else None,
            "finish_reason": self.reason or self.finished[-1].reason,
        }


def tokens_per_s(finished: Finished) -> float | None:
    """Return an answer's decoded tokens per second, without the prompt's time.

    None if the answer has fewer than two tokens.
    """
    tpot = tpot_s(finished)
    return 1 / tpot if tpot else None


def tpot_s(finished: Finished) -> float | None:
    """Return the mean seconds between an answer's tokens; None if it has fewer than two."""
    if finished.ttft_s is None or finished.new_tokens < 2:
        return None
    return max(0.0, finished.duration_s - finished.ttft_s) / (finished.new_tokens - 1)


class RequestLog:
    """Writes one log line for each HTTP request, as text or JSON.

    Routine responses of /health (200, 503), /metrics and /v1/live (200), and the files of the live
    page are left out. `write` gets each line; by default lines go to standard error.
    """

    def __init__(self, form: str = "text", write: Callable[[str], object] | None = None) -> None:
        self._json = form == "json"
        self._write = write or _to_stderr

    def log_request(self, record: RequestRecord) -> None:
        if (record.path, record.status) in QUIET or record.path.startswith(QUIET_FOLDER):
            return
        facts = {"time": _now(), **record.facts()}
        self._emit(facts, _text(facts))

    def log_message(self, message: str) -> None:
        """Write a message about the server to the request log."""
        self._emit({"time": _now(), "message": message}, message)

    def log_failure(self, name: str, error: BaseException) -> None:
        """Write an error with its traceback to the request log.

        `name` says where the error occurred: a request's id, or a module's name.
        """
        what = "".join(traceback.format_exception(error)).rstrip()
        now = _now()
        self._emit({"time": now, "id": name, "traceback": what}, f"{now} {name} failed:\n{what}")

    def _emit(self, facts: dict[str, object], text: str) -> None:
        self._write(json.dumps(facts) if self._json else text)


class LogForwarder(logging.Handler):
    """Logging handler that writes Greenroom's warnings and errors to the request log."""

    def __init__(self, log: RequestLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.log_message(f"greenroom: {record.getMessage()}")
        if record.exc_info and record.exc_info[1] is not None:
            self._log.log_failure(record.name, record.exc_info[1])


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")[:23] + "Z"


def _text(facts: dict[str, object]) -> str:
    head = "{time} {id} {method} {path} {status}".format(**facts)
    parts = [str(facts["model"])] if "model" in facts else []
    if "new_tokens" in facts:
        reused = f" ({facts['reused_tokens']} reused)" if facts["reused_tokens"] else ""
        parts += [f"{facts['prompt_tokens']} prompt{reused} + {facts['new_tokens']} new tokens"]
        parts += [f"TTFT {facts['ttft_s']} s"] * (facts["ttft_s"] is not None)
        parts += [f"{facts['tokens_per_s']} tokens/s"] * (facts["tokens_per_s"] is not None)
        if isinstance(facts["hit_ratio"], float):
            parts.append(f"hit ratio {facts['hit_ratio']:.1%}")
        parts.append(str(facts["finish_reason"]))
    parts.append(f"{facts['duration_s']} s")
    if "error" in facts:
        parts.append(str(facts["error"]))
    return " · ".join([head, *parts])
