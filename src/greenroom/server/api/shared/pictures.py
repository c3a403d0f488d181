"""Pictures in messages: parts of requests that have them, and their way into a prompt.

Only pictures in the request itself are read. The server fetches nothing from addresses or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.hf.pictures.header import FORMATS
from greenroom.hf.pictures.prompt import PromptPictures
from greenroom.hf.pictures.support import TEXT_ONLY
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import text_of, text_schema

Messages = list[dict[str, Any]]
FETCHES_NOTHING = "this server fetches nothing"


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture in a message; `name` is the API's term for its kind, in the plural."""

    encoded: EncodedPicture
    name: str


Content = str | tuple[str | PicturePart, ...]


def join_texts(parts: Sequence[str | PicturePart]) -> Content:
    """Join consecutive texts of a message with newlines; return one text if that is all."""
    joined: list[str | PicturePart] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(last := joined[-1], str):
            joined[-1] = f"{last}\n{part}"
        else:
            joined.append(part)
    if not joined:
        return ""
    if len(joined) == 1 and isinstance(joined[0], str):
        return joined[0]
    return tuple(joined)


class ContentValidator:
    """Validator of a message's content in OpenAI's APIs: a text, or parts with pictures.

    texts:   the types of text parts
    picture: the type of picture parts
    nested:  whether the address of a picture is in an object
    """

    def __init__(self, texts: tuple[str, ...], picture: str, nested: bool) -> None:
        self._texts, self._picture, self._nested = texts, picture, nested

    def __call__(self, value: Any) -> Content:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("content must be a string, or a list of parts")
        return join_texts([self._part(part) for part in value])

    def _part(self, part: Any) -> str | PicturePart:
        kind = self._picture
        if not (isinstance(part, dict) and part.get("type") == kind):
            return text_of(part, self._texts)
        holder = part.get("image_url") if self._nested else part
        names = {"url", "detail"} if self._nested else {"type", "image_url", "detail", "file_id"}
        if not isinstance(holder, dict) or (self._nested and set(part) != {"type", "image_url"}):
            raise ValueError(f"{kind} parts must have an image_url with a url, and nothing else")
        if unknown := sorted(set(holder) - names):
            raise ValueError(f"{unknown[0][:40]} of {kind} parts is not supported")
        if holder.get("detail") not in (None, "auto"):
            raise ValueError(f"detail of {kind} parts must be 'auto'")
        if holder.get("file_id") is not None:
            raise ValueError(f"file_id of {kind} parts is not supported: {FETCHES_NOTHING}")
        url = holder.get("url" if self._nested else "image_url")
        return PicturePart(_read_url(url, f"{kind} parts"), f"{kind} parts")

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a message's content."""
        url = {"type": "string", "pattern": "^data:image/(png|jpeg|webp|gif);base64,"}
        detail = {"enum": ["auto", None]}
        kind, fields = {"enum": [self._picture]}, {"image_url": url, "detail": detail}
        if self._nested:
            inner = {"url": url, "detail": detail}
            fields = {"image_url": _object(inner, ["url"])}
        else:
            fields["file_id"] = {"type": "null"}
        part = _object({"type": kind, **fields}, ["type", "image_url"])
        text, parts = text_schema(self._texts)["anyOf"]
        return {"anyOf": [text, {**parts, "items": {"anyOf": [parts["items"], part]}}]}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _read_url(url: Any, name: str) -> EncodedPicture:
    """Split a data URL into media type and base64; ValueError for other addresses."""
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    kind, _, encoding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:") or encoding != "base64":
        raise ValueError(
            f"{name} must have a data URL (data:image/png;base64,...): {FETCHES_NOTHING}"
        )
    if kind not in FORMATS:
        raise ValueError(f"{name} must have one of the types {', '.join(FORMATS)}")
    return EncodedPicture(data, kind)


def prompt_of(
    dialogue: Dialogue, messages: Messages, tools: Any, resume: bool, options: dict[str, Any]
) -> tuple[tuple[int, ...], PromptPictures | None]:
    """Convert messages to a prompt: its token ids, and its pictures if there are any.

    ApiError if the model takes no pictures; UsageError or TooLong for pictures that are not valid
    or too large. The other arguments are those of `Dialogue.chat`.
    """
    parts = [
        part
        for message in messages
        if isinstance(message["content"], tuple)
        for part in message["content"]
        if isinstance(part, PicturePart)
    ]
    if not parts:
        return tuple(dialogue.chat(messages, tools, resume, **options)), None
    reader = dialogue.pictures
    if reader is None or reader.obstacle:
        why = TEXT_ONLY if reader is None else reader.obstacle
        message = f"{parts[0].name} are not supported: {why}"
        raise ApiError(400, message, param="messages", code="unsupported_parameter")
    turns = [{**each, "content": _template_content(each["content"])} for each in messages]
    ids = dialogue.chat(turns, tools, resume, **options)
    return reader.read(ids, [part.encoded for part in parts])


def _template_content(content: Content) -> str | list[dict[str, str]]:
    """Convert a message's content to the form that chat templates take."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in content
    ]
