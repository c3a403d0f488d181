"""The output of OpenAI's responses API: items, and the streamed events that build them.

An item is a message, reasoning or a function call. Consecutive parts of one type form one item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from greenroom.hf.text.dialogue import Dialogue, ToolCall
from greenroom.server.api.shared.usage import logprobs
from greenroom.server.engine.tokens.reader import AnswerDelta, AnswerEnd
from greenroom.server.http.route_helpers import new_id

# By type of item: (prefix of its id, type of its part, further fields of the item, of the part).
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "message": (
        "msg_", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs_", "reasoning_text", {"summary": []}, {}),
}  # fmt: skip


class Output:
    """Builds the output items of OpenAI's responses from an answer's parts, and yields events."""

    def __init__(self, dialogue: Dialogue, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._dialogue, self._with_logprobs = dialogue, with_logprobs
        self._open: str | None = None  # the type of the open item

    def add(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        if delta.call:
            yield from self._close("completed")
            yield from self._call(delta.call)
            return
        kind = "reasoning" if delta.reasoning else "message"
        if not (delta.text or delta.reasoning):
            return
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        yield self._grow(delta, kind)

    def end(self, end: AnswerEnd) -> Iterator[dict[str, Any]]:
        yield from self._close("incomplete" if end.reason == "length" else "completed")

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **more}

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        """Make an event of the last output item."""
        return self._event(kind, item_id=self.items[-1]["id"], **more)

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **more)

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        self._open = kind
        prefix, part_type, of_item, of_part = KINDS[kind]
        item = {"type": kind, "id": new_id(prefix), "status": "in_progress", "content": []}
        self.items.append(item | of_item)
        yield self._event("output_item.added", item={**self.items[-1]})
        part = {"type": part_type, "text": "", **of_part}
        self.items[-1]["content"] = [part]
        yield self._of_part("content_part.added", part={**part})

    def _grow(self, delta: AnswerDelta, kind: str) -> dict[str, Any]:
        part = self.items[-1]["content"][0]
        more: dict[str, Any] = {"delta": delta.text or delta.reasoning}
        part["text"] += more["delta"]
        if kind == "message":
            scored = delta.tokens if self._with_logprobs else ()
            more["logprobs"] = logprobs(self._dialogue, scored)
            part["logprobs"] = [*part["logprobs"], *more["logprobs"]]
        return self._of_part(f"{part['type']}.delta", **more)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        item, self._open = self.items[-1], None
        part = item["content"][0]
        item["status"] = status
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._of_part(f"{part['type']}.done", **fields)
        yield self._of_part("content_part.done", part={**part})
        yield self._event("output_item.done", item={**item})

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item = {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": new_id("call_"),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        yield self._event("output_item.added", item={**item})
        written = "function_call_arguments"
        yield self._of_item(f"{written}.delta", delta=call.arguments)
        yield self._of_item(f"{written}.done", name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("output_item.done", item={**item})
