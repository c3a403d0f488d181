"""Request parameters that Ollama's chat and generate have in common.

Ollama ignores parameters that it does not know. Here they are errors, as in the other APIs. Options
of Ollama's loader (threads, layers on GPUs, mmap) change no answer, and are accepted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from greenroom.errors import TooLong
from greenroom.hf.text.dialogue import Dialogue
from greenroom.server.api.shared.conversation import JsonForm, thinking
from greenroom.server.engine.requests import Sampling
from greenroom.server.http.answers import Job
from greenroom.server.http.errors import ApiError
from greenroom.server.http.params import Penalty, Seed, Share, Stop, StrictModel, Temperature

EFFORTS = Literal["low", "medium", "high"]
DURATION = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+", re.ASCII)
One = Annotated[float, Field(ge=1, le=1)]


def _keep_alive(value: Any) -> Any:
    """Validate how long the model shall stay loaded: seconds, or a duration as Go writes it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not (
        number or (isinstance(value, str) and (value == "0" or DURATION.fullmatch(value)))
    ):
        raise ValueError("keep_alive must be a number of seconds, or a duration such as 5m")
    if not any(digit in "123456789" for digit in str(value)):
        raise ValueError(
            "keep_alive 0 would unload the model, but this server's model stays loaded"
        )
    return value


def _format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('format must be "json" or a JSON schema')


def _think(value: Any) -> Any:
    if isinstance(value, bool) or value in ("low", "medium", "high"):
        return value
    raise ValueError("think must be true, false, low, medium or high")


def _empty(why: str) -> BeforeValidator:
    """Make a validator that accepts an empty value only; `why` is the error message."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


KeepAlive = Annotated[
    float | str,
    PlainValidator(_keep_alive, json_schema_input_type=float | str),
]
Format = Annotated[
    str | dict[str, Any],
    PlainValidator(_format, json_schema_input_type=Literal["", "json"] | dict[str, Any]),
]
Think = Annotated[bool | str, PlainValidator(_think, json_schema_input_type=bool | EFFORTS)]
NoContext = Annotated[
    list[int],
    _empty("context is not supported: send the conversation to /api/chat"),
    Field(max_length=0),
]
NoTemplate = Annotated[
    str,
    _empty("template is not supported: the model's own is used, or none with raw"),
    Field(max_length=0),
]
NoSuffix = Annotated[
    str, _empty("suffix is not supported: text is continued at its end"), Field(max_length=0)
]


class OllamaOptions(StrictModel):
    """The object `options` of Ollama's requests."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None  # 0: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None  # -1: a random one
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | None = None
    num_predict: Annotated[int, Field(ge=-2, le=1 << 31)] | None = None  # -1, -2: no limit
    num_ctx: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    # Supported only with their neutral values:
    repeat_last_n: Literal[-1] | None = None
    typical_p: One | None = None
    tfs_z: One | None = None
    mirostat: Annotated[int, Field(ge=0, le=0)] | None = None
    penalize_newline: Literal[True] | None = None
    # Without effect on an answer here:
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> OllamaOptions:
        if self.num_predict == 0:
            raise ValueError("num_predict must be at least 1, or -1 for no limit")
        return self

    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            None if self.seed in (None, -1) else self.seed % (1 << 63),
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            self.repeat_penalty or 1.0,
        )


class OllamaRequest(StrictModel):
    """Request parameters that Ollama's chat and generate both have; `stream` is true by default."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool | None = True
    format: Format | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Supported only with their neutral values:
    truncate: Literal[False] | None = None
    shift: Literal[False] | None = None

    @model_validator(mode="after")
    def _combines(self) -> OllamaRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.think and self.format:
            raise ValueError("think and format exclude each other: send one of them")
        return self

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def check_context(self, context: int) -> None:
        """Raise ApiError if a client needs a longer context than the server's."""
        if self.options and (self.options.num_ctx or 0) > context:
            raise ApiError(
                400,
                f"options.num_ctx is above this server's context of {context} tokens (--context)",
                param="options.num_ctx",
            )

    def form(self) -> JsonForm | None:
        if not self.format:
            return None
        return JsonForm("format", "format", self.format if self.format != "json" else None)  # type: ignore[arg-type]

    def reasoning(self, dialogue: Dialogue) -> dict[str, Any]:
        """Return the options of the chat template for `think`; ApiError if it has none."""
        if self.think is None:
            return {}
        if self.think is False:
            return thinking(dialogue, "none", "think")
        if not dialogue.supports_reasoning:
            raise ApiError(400, "think: this model does not support reasoning", param="think")
        if self.think is True:
            return {"enable_thinking": True} if dialogue.template_uses("enable_thinking") else {}
        return thinking(dialogue, str(self.think), "think")

    def settings(self) -> dict[str, Any]:
        """Return the fields of a Job for the request's options."""
        options = self.options or OllamaOptions()
        return {
            "sampling": options.sampling(),
            "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
            "stops": options.stop or (),
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    def within_context(self, job: Job) -> Job:
        """Limit a Job's answer to the rest of `num_ctx`; TooLong if the prompt leaves none."""
        most = self.options.num_ctx if self.options else None
        if most is None:
            return job
        left = most - len(job.prompts[0])
        if left < 1:
            raise TooLong(
                f"the prompt has {len(job.prompts[0])} tokens, and options.num_ctx is {most}"
            )
        return replace(job, max_tokens=min(left, job.max_tokens or left))
