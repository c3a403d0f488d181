"""What a model's tokens mean to people: its chat template, its text, and how its answers are read.

    dialogue = Dialogue(tokenizer, "qwen3_moe")
    ids = dialogue.chat([{"role": "user", "content": "Hello"}])
    spoken = dialogue.spoken(ids)            # of each token in turn: spoken.feed(token_id)

Reasoning and tool calls are found by transformers' own response parsers, where the model has a
response template; other models' answers are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving import utils as serving
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from greenroom.errors import UsageError
from greenroom.hf.text.prompt_limit import PromptLimit, token_ids
from greenroom.hf.text.templates import REASONING, Templates

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers with a byte fallback write a byte
HALF = "\ufffd"  # what tokenizers write for bytes that are no character
MOST_HELD = 8  # tokens that wait for the rest of a character, which has at most four bytes
MOST_TOKENS = 1 << 20  # of a prompt whose model has no limit of its own
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A part of an answer: text for people, reasoning, or a tool call. One of them is set."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class Dialogue:
    """A tokenizer, its templates, and the kind of model (`model_type` of its config) it is for."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_type: str | None = None,
        context: int = MOST_TOKENS,
    ) -> None:
        """Prompts of more than `context` tokens are refused, most of them before any work."""
        self.tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self._limit = PromptLimit(tokenizer, context)
        self.templates = Templates(self._limit.most_chars)
        self._response_template = self._find_response_template(model_type)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @cached_property
    def supports_tools(self) -> bool:
        """Whether tools can be told to the model, and its calls be found in what it says."""
        return self.template_uses("tools") and "tool_calls" in self._fields

    @property
    def supports_reasoning(self) -> bool:
        """Whether the model has a way to reason before it answers."""
        return any(name in self._fields for name in REASONING)

    @property
    def _fields(self) -> Any:
        """What the model's answers are parsed into."""
        return self._response_template.fields if self._response_template else {}

    def template_uses(self, name: str) -> bool:
        """Whether the chat template looks at this variable."""
        found = self.tokenizer.chat_template or ""
        texts = found.values() if isinstance(found, dict) else (found,)
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)

    def chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        resume: bool = False,
        ends: bool = False,
        **told: Any,
    ) -> list[int]:
        """Ids of a conversation, up to where the model speaks, or goes on where `resume`, or to
        its end where it `ends`.

        `told` are further variables of the template. UsageError where it cannot take the messages.
        """
        if not self.has_template:
            raise UsageError("this model has no chat template: it only completes text")
        self._limit.check_messages(messages, tools)
        text = self.templates.chat(self.tokenizer, messages, tools, resume, ends, **told)
        return self.encode(text, special=False)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text as it is, and of what the tokenizer puts around texts where `special`."""
        self._limit.check_text(text)
        return token_ids(self.tokenizer, text, special)

    def close(self) -> None:
        """End the process that renders templates."""
        self.templates.close()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids, with special tokens or without."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, also where that is half a character."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token_id in self.tokenizer.added_tokens_decoder or token is None:
            return (token or "").encode()
        if self._letters:
            return bytes(self._letters[letter] for letter in token if letter in self._letters)
        if match := BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return self.decode([token_id]).encode()

    def reply_parser(self, prompt: Sequence[int], tools: Tools | None = None) -> ReplyParser:
        """A reader for the answer to this prompt."""
        if self._response_template is None:
            return ReplyParser(self)
        # The parser must see what the template has begun to say, as "<think>".
        prefix = self.decode(prompt, special=True)
        return ReplyParser(self, ResponseParser(self._response_template, prefix, tools=tools))

    @cached_property
    def _letters(self) -> dict[str, int]:
        """The byte that each letter of a byte-level vocabulary is; empty for other vocabularies."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or "ByteLevel" not in repr(backend.decoder):
            return {}
        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    def _find_response_template(self, model_type: str | None) -> Any:
        """The tokenizer's own; that of its kind of model where its chat template fits; or None."""
        own = getattr(self.tokenizer, "response_template", None)
        if own is not None:
            return load_response_template(own)
        config = type("Config", (), {"model_type": model_type})
        found = serving.get_response_template(self.tokenizer, type("Model", (), {"config": config}))
        if found is None or not self.has_template:
            return None
        template = load_response_template(found)
        try:
            begun = self.decode(self.chat([{"role": "user", "content": "Hello"}]), special=True)
        except UsageError:
            return None
        return template if template.start_anchor_re.search(begun) else None


class ReplyParser:
    """Turns tokens into text, reasoning and tool calls, by a response parser; without one, all is
    text.

    What the parser cannot read (a call that is no JSON) is text, and so is all that follows.
    """

    def __init__(self, dialogue: Dialogue, parser: ResponseParser | None = None) -> None:
        self._text = TextDecoder(dialogue, special=parser is not None)
        self._parser = parser
        self._raw = ""
        self._shown = 0  # characters of `_raw` that are told, or were delimiters
        # A region has ended, or one with a delimiter has begun: its first spaces say nothing.
        self._between = False
        if parser is not None:
            self._said(parser.initial_events)
            self._shown = 0

    def feed(self, token_id: int) -> list[ReplyPart]:
        return self._parse(self._text.feed(token_id))

    def end(self) -> list[ReplyPart]:
        said = self._parse(self._text.end())
        if self._parser is None:
            return said
        try:
            _, events = self._parser.finalize()
        except Exception:  # whatever a content parser says of what the model wrote
            return said + self._give_up()
        return said + self._said(events)

    def _parse(self, text: str) -> list[ReplyPart]:
        if not text:
            return []
        if self._parser is None:
            return [ReplyPart(text)]
        self._raw += text
        try:
            events = self._parser.feed(text)
        except Exception:  # whatever a content parser says of what the model wrote
            return self._give_up()
        return self._said(events)

    def _said(self, events: list[dict[str, Any]]) -> list[ReplyPart]:
        said: list[ReplyPart] = []
        for event in events:
            if event["type"] == "region_close" or event.get("field") != "content":
                self._between = self._between or event["type"] != "region_chunk"
            try:
                parts = serving.response_events_to_chunks([event])
            except (KeyError, TypeError):  # JSON, but no call
                return said + self._give_up()
            for part in parts:
                said += self._part(part)
        return said

    def _part(self, part: Any) -> list[ReplyPart]:
        if isinstance(part, serving.ToolCall):
            self._shown = len(self._raw)
            return [ReplyPart(call=ToolCall(part.name, part.arguments))]
        self._shown = self._raw.rfind(part) + len(part)
        text = part.lstrip() if self._between else str(part)
        self._between = self._between and not text
        if isinstance(part, serving.ReasoningText):
            return [ReplyPart(reasoning=text)] if text else []
        return _text(text)

    def _give_up(self) -> list[ReplyPart]:
        self._parser = None
        return _text(self._raw[self._shown :])


class TextDecoder:
    """Text of tokens as they come, whole characters at a time."""

    def __init__(self, dialogue: Dialogue, special: bool) -> None:
        self._dialogue, self._special = dialogue, special
        self._ids: list[int] = []  # a little of what is told, for context, and what is not yet
        self._told = 0  # of `_ids`

    def feed(self, token_id: int) -> str:
        """What is complete now; "" in the middle of a character."""
        self._ids.append(token_id)
        text = self._dialogue.decode(self._ids, self._special)
        half = text.endswith(HALF) and len(self._ids) - self._told < MOST_HELD
        return "" if half else self._take(text)

    def end(self) -> str:
        """What is left, complete or not."""
        return self._take(self._dialogue.decode(self._ids, self._special))

    def _take(self, text: str) -> str:
        """What the text of all tokens has that is not yet told."""
        before = self._dialogue.decode(self._ids[: self._told], self._special)
        # Tokenizers that write a space before words need to see the tokens just before.
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        return text[len(before) :]


def _text(text: str) -> list[ReplyPart]:
    return [ReplyPart(text)] if text else []
