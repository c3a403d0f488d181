"""Transcripts of clients: what a client sent, what it got, and whether a server still answers so.

A transcript is a file of JSON lines. The first has the client with its version and the engine that
answered. Each further line is an exchange: a request and its response, in order of requests.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("transcripts")
HEADERS = ("content-type", "accept", "anthropic-version", "anthropic-beta", "openai-beta")
IDS = re.compile(r"\b(chatcmpl-|cmpl-|(?:req|resp|msg|rs|fc|call|toolu)_)[0-9a-f]{8,}\b")
# Values that differ between two answers or two releases; their type must stay the same.
VOLATILE = re.compile(
    r"created|created_at|completed_at|modified_at|expires_at|version|size|.*_duration"
)


@dataclass(frozen=True)
class Exchange:
    """A request and its response; `parts` are the JSON values or texts of the response's body."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    media_type: str
    parts: list[Any]

    @property
    def summary(self) -> str:
        """One line: the request's parameters, the response's status and its text or tool calls."""
        sent = f" {', '.join(sorted(self.body))}" if isinstance(self.body, dict) else ""
        count = f", {len(self.parts)} parts" if len(self.parts) > 1 else ""
        text = "".join(map(answer_text, self.parts)).replace("\n", "\\n")
        return (
            f"{self.method} {self.path}{sent} → {self.status}{count}{f': {text}' if text else ''}"
        )


@dataclass(frozen=True)
class Transcript:
    """A client's exchanges with a server; without `answers`, the demo model wrote the answers.

    Scripted `answers` are pairs: a text of the prompt, and the answer to prompts with this text.
    The first pair whose text occurs counts.
    """

    client: str
    answers: list[list[str]]
    exchanges: list[Exchange]

    def write(self, path: Path) -> None:
        head = {"client": self.client, "answers": self.answers}
        lines = [head, *map(asdict, self.exchanges)]
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    @classmethod
    def read(cls, path: Path) -> Transcript:
        head, *exchanges = map(json.loads, path.read_text().splitlines())
        return cls(**head, exchanges=[Exchange(**each) for each in exchanges])


def parts_of(media_type: str, body: bytes) -> list[Any]:
    """Split a response's body: events of a stream, lines of JSON, one object, or a text."""
    text = body.decode()
    kind = media_type.partition(";")[0]
    if kind == "text/event-stream":
        return [event for block in text.split("\n\n") if (event := _event(block)) is not None]
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    if kind == "application/json":
        return [json.loads(text)]
    return [f"{len(body)} bytes"] if len(body) > 200 else [text] if text else []


def _event(block: str) -> Any:
    """Parse a server-sent event; None for comments."""
    fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] not in ("", ":"))
    if "data" not in fields:
        return None
    data = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
    return {"event": fields["event"], "data": data} if "event" in fields else data


def difference(recorded: Exchange, answered: Exchange) -> str | None:
    """Say where a response differs from the recorded one; None if both have the same meaning.

    Ids may differ, but must agree with each other in the same way; times, sizes and versions may
    differ, but not in type. Everything else must be equal.
    """
    for name in ("status", "media_type"):
        if (was := getattr(recorded, name)) != (now := getattr(answered, name)):
            return f"{name}: {was!r} was recorded, now {now!r} {answered.parts[:1]}"
    return _first_difference(_stable(recorded.parts, {}), _stable(answered.parts, {}), "parts")


def _stable(value: Any, ids: dict[str, str], key: str = "") -> Any:
    """Replace ids by their number of first occurrence, and volatile values by their type."""
    if isinstance(value, dict):
        return {name: _stable(each, ids, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_stable(each, ids) for each in value]
    if VOLATILE.fullmatch(key):
        return type(value).__name__
    if isinstance(value, str):
        return IDS.sub(lambda m: ids.setdefault(m[0], f"{m[1]}{len(ids)}"), value)
    return value


def _first_difference(was: Any, now: Any, where: str) -> str | None:
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        pairs = [(f"{where}.{key}", was[key], now[key]) for key in was]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(f"{where}.{i}", *pair) for i, pair in enumerate(zip(was, now, strict=True))]
    else:
        same = type(was) is type(now) and was == now
        return None if same else f"{where}: {was!r} was recorded, now {now!r}"
    return next((found for at, a, b in pairs if (found := _first_difference(a, b, at))), None)


def answer_text(part: Any) -> str:
    """Return the text and tool calls in a part of any API's response; "" if it has none."""
    if not isinstance(part, dict):
        return ""
    data: dict[str, Any] = part["data"] if "event" in part else part
    kind, delta = data.get("type", ""), data.get("delta")
    if kind.endswith((".output_text.delta", ".function_call_arguments.delta")):
        return str(delta)
    if kind in ("response.output_item.added", "content_block_start"):
        start = data.get("item") or data["content_block"]
        return f"{start['name']} " if "name" in start else ""
    if kind.startswith("response."):
        return ""  # what the deltas had
    choices = [choice.get("delta") or choice.get("message") for choice in data.get("choices", ())]
    return "".join(map(_text_of, (data.get("error"), data.get("message"), data, delta, *choices)))


def _text_of(value: Any) -> str:
    """Return the text and tool calls in a message, block or item of any API."""
    if isinstance(value, str | None):
        return value or ""
    if isinstance(value, list):
        return "".join(map(_text_of, value))
    texts = [value.get(name) for name in ("content", "text", "partial_json", "response", "output")]
    texts.append(value["message"] if isinstance(value.get("message"), str) else None)  # an error
    texts += [call["function"] for call in value.get("tool_calls") or ()]
    arguments = value.get("arguments", value.get("input"))
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or None)
    call = f"{value['name']} {arguments.replace('null', '')}" if "name" in value else ""
    return call + "".join(map(_text_of, texts))
