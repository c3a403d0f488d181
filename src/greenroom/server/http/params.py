"""Request parameters that several APIs share; unknown or unsupported ones are errors.

A parameter that this server does not support accepts its neutral value only: `None`, or a literal.
Labels of a request (user, metadata) change no answer, and are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from greenroom.server.engine.requests import Sampling

Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Tokens = Annotated[int, Field(ge=1, le=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Labels = Annotated[dict[str, str], Field(max_length=64)]
TAG = "~"
CallId = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class StrictModel(BaseModel):
    """A strict Pydantic model: no conversions, no further fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _strings(value: Any) -> Any:
    """Validate the stop strings of a request: one or several."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("stop must be a string, or a list of strings, none of them empty")
    if len(strings) > 16 or max(map(len, strings), default=0) > 1024:
        raise ValueError("stop takes at most 16 strings of at most 1024 characters each")
    return tuple(strings)


Filled = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(
        _strings, json_schema_input_type=Filled | Annotated[list[Filled], Field(max_length=16)]
    ),
]


def _biases(value: Any) -> Any:
    """Validate the parameter logit_bias: {"token id": bias}."""
    if not isinstance(value, dict) or len(value) > 1024:
        raise ValueError("logit_bias must be an object of at most 1024 token ids")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"logit_bias: {key[:20]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias.{key} must be a number from -100 to 100")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        }
    ),
]


def text_validator(types: tuple[str, ...]) -> Any:
    """Make a validator that joins a list of text parts with newlines; strings stay as they are.

    `types` are the values of "type" that the API gives text parts. The validator raises ValueError
    for other parts.
    """

    def joined(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return "\n".join(text_of(part, types) for part in value)

    return joined


def text_of(part: Any, types: tuple[str, ...]) -> str:
    """Return the text of a text part; ValueError for other parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in types:
        what = f"{kind[:40]} parts" if isinstance(kind, str) else "parts without a type"
        raise ValueError(f"{what} are not supported here, only text")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a {kind} part must have a string as its text")
    harmless = {"type", "text", "cache_control", "annotations", "citations", "logprobs"}
    if unknown := sorted(set(part) - harmless):
        raise ValueError(f"{unknown[0][:40]} of a {kind} part is not supported")
    return str(part["text"])


def text_schema(types: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON schema of a string or a list of text parts (see `text_validator`)."""
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(types)}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


_TEXT = ("text",)
Text = Annotated[str, BeforeValidator(text_validator(_TEXT)), WithJsonSchema(text_schema(_TEXT))]


def tag(name: str) -> Tag:
    """Make the tag of one type in a Pydantic union that `by_type` discriminates.

    Error messages do not show tags.
    """
    return Tag(TAG + name)


def by_type(default: str | None = None) -> Discriminator:
    """Make a discriminator of a Pydantic union, by the field "type" of its values.

    `default` is the type of values without that field.
    """

    def tag_of(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else None
        return TAG + kind if isinstance(kind, str) else None

    return Discriminator(tag_of)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A request's choice of tools: by the model (auto), none, required, or one named tool."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Must the answer be a tool call?"""
        return self.kind in ("required", "named")


def tool_choice_validator(named: Any) -> PlainValidator:
    """Make a validator of the parameter tool_choice of OpenAI's APIs.

    `named` is the Pydantic model with which the API names one function.
    """
    form = Literal["auto", "none", "required"] | named
    adapter: TypeAdapter[Any] = TypeAdapter(form)

    def parse(value: Any) -> ToolChoice:
        try:
            choice = adapter.validate_python(value)
        except ValidationError:
            raise ValueError("tool_choice must be auto, none, required, or a function's name in the"
                             " form of this API") from None  # fmt: skip
        if isinstance(choice, str):
            return ToolChoice(choice)  # type: ignore[arg-type]
        return ToolChoice("named", getattr(choice, "function", choice).name)

    return PlainValidator(parse, json_schema_input_type=form)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingParams(StrictModel):
    """Sampling parameters of HTTP requests, by the names of OpenAI, vLLM and others."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    top_k: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None

    def sampling(self) -> Sampling:
        values = self.model_dump(include=set(SamplingParams.model_fields), exclude_none=True)
        if "seed" in values:
            values["seed"] %= 1 << 63
        return Sampling(**values)


class OpenAIRequest(SamplingParams):
    """Request parameters that all of OpenAI's APIs have."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool | None = None
    user: str | None = None
    metadata: Labels | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionParams(OpenAIRequest):
    """Request parameters that both OpenAI's completions and chat completions have."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class ConversationParams(OpenAIRequest):
    """Request parameters that both OpenAI's chat completions and responses have."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_key: str | None = None
    # Supported only with their neutral values:
    store: Literal[False] | None = None
    moderation: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None

    @model_validator(mode="after")
    def _calls(self) -> Self:
        if self.tool_choice and self.tool_choice.kind != "none" and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


class Function(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def template_tool(self) -> dict[str, Any]:
        """Return a tool's function in the form that chat templates take."""
        function = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class FunctionType(StrictModel):
    """A tool of OpenAI's type "function", the only one that is supported."""

    type: Literal["function"]


class NamedFunction(FunctionType):
    """A function's name in the form of OpenAI's responses API."""

    name: str


Items = TypeVar("Items")
Tools = Annotated[list[Items], Field(max_length=128, fail_fast=True)]
Turns = Annotated[list[Items], Field(min_length=1, fail_fast=True)]
