"""The output of a response: items, and the events that tell how they grow.

An item is a message, reasoning or a function call; deltas of one kind in a row are one item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.shared.usage import logprobs
from greenroom.server.engine.tokens.reader import Delta, End
from greenroom.server.http.routes import new_id

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class Output:
    """Builds items from deltas; every step is an event (without its sequence number)."""

    def __init__(self, dialogue: Dialogue, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._dialogue, self._with_logprobs = dialogue, with_logprobs
        self._open: str | None = None  # the kind of the item that grows

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.call:
            yield from self._close("completed")
            yield from self._call(delta)
            return
        kind = "reasoning" if delta.reasoning else "message"
        if not (delta.text or delta.reasoning):
            return
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        yield self._grow(delta, kind)

    def end(self, end: End) -> Iterator[dict[str, Any]]:
        yield from self._close("incomplete" if end.reason == "length" else "completed")

    @property
    def _at(self) -> dict[str, Any]:
        """Where the last item is, as events say it."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        self._open = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": new_id("msg_"), "role": "assistant"}
        else:
            item |= {"id": new_id("rs_"), "summary": []}
        self.items.append(item)
        yield self._item("added", {**item})
        part: dict[str, Any] = {"type": PARTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"] = [part]
        yield self._part("added", {**part})

    def _grow(self, delta: Delta, kind: str) -> dict[str, Any]:
        part = self.items[-1]["content"][0]
        text = delta.text or delta.reasoning
        part["text"] += text
        told = {"type": f"response.{PARTS[kind]}.delta", **self._at, "content_index": 0}
        told["delta"] = text
        if kind == "message":
            told["logprobs"] = self._logprobs(delta)
            part["logprobs"] = [*part["logprobs"], *told["logprobs"]]
        return told

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        item, kind, self._open = self.items[-1], self._open, None
        part = item["content"][0]
        item["status"] = status
        told = {"type": f"response.{PARTS[kind]}.done", **self._at, "content_index": 0}
        told["text"] = part["text"]
        if kind == "message":
            told["logprobs"] = part["logprobs"]
        yield told
        yield self._part("done", {**part})
        yield self._item("done", {**item})

    def _call(self, delta: Delta) -> Iterator[dict[str, Any]]:
        assert delta.call is not None
        item = {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": new_id("call_"),
            "name": delta.call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        yield self._item("added", {**item})
        head, arguments = "response.function_call_arguments", delta.call.arguments
        yield {"type": f"{head}.delta", **self._at, "delta": arguments}
        yield {"type": f"{head}.done", **self._at, "name": item["name"], "arguments": arguments}
        item |= {"arguments": arguments, "status": "completed"}
        yield self._item("done", {**item})

    def _item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": item}

    def _part(self, what: str, part: dict[str, Any]) -> dict[str, Any]:
        told = {"type": f"response.content_part.{what}", **self._at, "content_index": 0}
        return {**told, "part": part}

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        return logprobs(self._dialogue, delta.tokens)
