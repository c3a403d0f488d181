"""Content blocks of messages in Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from greenroom.hf.pictures.decode import EncodedPicture
from greenroom.server.api.shared.pictures import FETCHES_NOTHING, PicturePart
from greenroom.server.http.params import CallId, Name, StrictModel, Text, Turns, by_type, tag


class CacheControl(StrictModel):
    """A cache hint of a client, accepted but ignored: common prefixes are always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


def _base64_source(value: Any) -> Any:
    """Refuse sources of pictures that are not in the request itself."""
    if not (isinstance(value, dict) and value.get("type") == "base64"):
        raise ValueError(f"an image must have a source of the type base64: {FETCHES_NOTHING}")
    return value


class ImageSource(StrictModel):
    """A picture in Anthropic's API, in the request itself."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: Annotated[ImageSource, BeforeValidator(_base64_source)]
    cache_control: CacheControl | None = None

    def part(self) -> PicturePart:
        """Return the picture as a part of a message."""
        return PicturePart(EncodedPicture(self.source.data, self.source.media_type), "image blocks")


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")],
    by_type(),
]
Blocks = Annotated[
    Turns[Block],
    BeforeValidator(lambda it: [{"type": "text", "text": it}] if isinstance(it, str) else it),
]
