"""Convert conversations to tokens by chat templates, and answers' tokens to text and tool calls.

    dialogue = Dialogue(tokenizer, "qwen3_moe")
    ids = dialogue.chat([{"role": "user", "content": "Hello"}])
    parser = dialogue.reply_parser(ids)
    parts = parser.feed(token_id)               # for each token of the answer, then parser.end()

If the model has a response template, transformers' response parser finds reasoning and tool calls
in its answers. The answers of other models are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving import utils as serving
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from greenroom.errors import UsageError
from greenroom.hf.text.prompt_limit import PromptLimit, token_ids
from greenroom.hf.text.templates import REASONING, Templates

if TYPE_CHECKING:
    from greenroom.hf.pictures.reader import PictureReader

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the token of a byte, in tokenizers with byte fallback
HALF = "\ufffd"  # in decoded text, for bytes that are no character
MOST_HELD = 8  # tokens that wait for the rest of a character, which has at most four bytes
MOST_TOKENS = 1 << 20  # in a prompt, where the model has no limit
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call in a model's answer: the tool's name, and its arguments as a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Part of a model's answer; exactly one of text, reasoning and tool call is set."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class Dialogue:
    """Tokenizer, chat template and response template for conversations with a model.

    The chat template renders a conversation as a prompt. The response template tells how to find
    reasoning and tool calls in an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_type: str | None = None,
        context: int = MOST_TOKENS,
        pictures: PictureReader | None = None,
    ) -> None:
        """Set up a model's tokenizer for conversations of at most `context` tokens.

        `model_type` is the entry of the model's config. It selects transformers' response template
        if the tokenizer has none. Prompts that are clearly too long for `context` are refused
        before they are rendered or tokenised. `pictures` reads the pictures of messages.
        """
        self.tokenizer, self.pictures = tokenizer, pictures
        self.vocabulary = len(tokenizer)
        self._limit = PromptLimit(tokenizer, context)
        self.templates = Templates(self._limit.most_chars)
        self._response_template = self._find_response_template(model_type)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @cached_property
    def supports_tools(self) -> bool:
        """Return whether the chat template uses tools, and tool calls in answers are parsed."""
        return self.template_uses("tools") and "tool_calls" in self._fields

    @property
    def supports_reasoning(self) -> bool:
        """Return whether the model's response template separates reasoning from the answer."""
        return any(name in self._fields for name in REASONING)

    @property
    def _fields(self) -> Any:
        """Return the fields of the model's response template; empty if it has none."""
        return self._response_template.fields if self._response_template else {}

    def template_uses(self, name: str) -> bool:
        """Return whether the model's chat template contains this name as a word."""
        templates = self.tokenizer.chat_template or ""
        texts = templates.values() if isinstance(templates, dict) else (templates,)
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)

    def chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        resume: bool = False,
        ends: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Convert a conversation to token ids, up to where the model's answer begins.

        With `resume`, the model's answer continues the text of the last message. With `ends`, the
        conversation ends with its last message, and the start of an answer is not added.
        `variables` are passed to the chat template. Raises TooLong for a conversation that cannot
        fit into the context, and UsageError if the model has no chat template or its template
        fails on the messages.
        """
        if not self.has_template:
            raise UsageError(
                "this model has no chat template: instead of messages, send one text that the"
                " model continues"
            )
        self._limit.check_messages(messages, tools)
        text = self.templates.chat(self.tokenizer, messages, tools, resume, ends, **variables)
        return self.encode(text, special=False)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Convert a text to token ids.

        With `special`, the tokenizer adds its special tokens, such as the start token. Raises
        TooLong for a text that cannot fit into the context.
        """
        self._limit.check_text(text)
        return token_ids(self.tokenizer, text, special)

    def close(self) -> None:
        """End the separate process that renders chat templates, if one runs."""
        self.templates.close()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Convert token ids to text; special tokens are left out unless `special` is true."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be a part of a character."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token_id in self.tokenizer.added_tokens_decoder or token is None:
            return (token or "").encode()
        if self._letters:
            return bytes(self._letters[letter] for letter in token if letter in self._letters)
        if match := BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return self.decode([token_id]).encode()

    def reply_parser(self, prompt: Sequence[int], tools: Tools | None = None) -> ReplyParser:
        """Make a parser of text, reasoning and tool calls in a prompt's answer.

        `prompt` has the prompt's token ids, and `tools` are the tools that it lists.
        """
        if self._response_template is None:
            return ReplyParser(self)
        # The template may have begun the answer, as with "<think>".
        prefix = self.decode(prompt, special=True)
        return ReplyParser(self, ResponseParser(self._response_template, prefix, tools=tools))

    @cached_property
    def _letters(self) -> dict[str, int]:
        """Return the byte of each letter of a byte-level vocabulary; empty for others."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or "ByteLevel" not in repr(backend.decoder):
            return {}
        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    def _find_response_template(self, model_type: str | None) -> Any:
        """Return the tokenizer's response template, or transformers' for the model type.

        Transformers' template is used only if its start marker occurs in a rendered prompt. The
        result is None if there is no usable template.
        """
        declared = getattr(self.tokenizer, "response_template", None)
        if declared is not None:
            return load_response_template(declared)
        config = type("Config", (), {"model_type": model_type})
        response_template = serving.get_response_template(
            self.tokenizer, type("Model", (), {"config": config})
        )
        if response_template is None or not self.has_template:
            return None
        template = load_response_template(response_template)
        try:
            prompt = self.decode(self.chat([{"role": "user", "content": "Hello"}]), special=True)
        except UsageError:
            return None
        return template if template.start_anchor_re.search(prompt) else None


class ReplyParser:
    """Parser of an answer's tokens into text, reasoning and tool calls, token by token.

    Without a transformers `parser`, the entire answer is text. If the parser fails, as on a tool
    call that is not JSON, the remaining answer is text.
    """

    def __init__(self, dialogue: Dialogue, parser: ResponseParser | None = None) -> None:
        self._text = TextDecoder(dialogue, special=parser is not None)
        self._parser = parser
        self._raw = ""
        self._shown = 0  # characters of `_raw` that were returned, or were delimiters
        # After a region's end or an opening delimiter: leading spaces are dropped.
        self._skip_spaces = False
        if parser is not None:
            self._parts(parser.initial_events)
            self._shown = 0

    def feed(self, token_id: int) -> list[ReplyPart]:
        """Parse one more token of an answer; return the parts that can be shown now."""
        return self._parse(self._text.feed(token_id))

    def end(self) -> list[ReplyPart]:
        """End an answer; return the parts that waited for more tokens."""
        parts = self._parse(self._text.end())
        if self._parser is None:
            return parts
        try:
            _, events = self._parser.finalize()
        except Exception:  # content parsers raise errors of any type
            return parts + self._give_up()
        return parts + self._parts(events)

    def _parse(self, text: str) -> list[ReplyPart]:
        if not text:
            return []
        if self._parser is None:
            return [ReplyPart(text)]
        self._raw += text
        try:
            events = self._parser.feed(text)
        except Exception:  # content parsers raise errors of any type
            return self._give_up()
        return self._parts(events)

    def _parts(self, events: list[dict[str, Any]]) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        for event in events:
            if event["type"] == "region_close" or event.get("field") != "content":
                self._skip_spaces = self._skip_spaces or event["type"] != "region_chunk"
            try:
                chunks = serving.response_events_to_chunks([event])
            except (KeyError, TypeError):  # JSON, but not a call
                return parts + self._give_up()
            for chunk in chunks:
                parts += self._part(chunk)
        return parts

    def _part(self, chunk: Any) -> list[ReplyPart]:
        if isinstance(chunk, serving.ToolCall):
            self._shown = len(self._raw)
            return [ReplyPart(call=ToolCall(chunk.name, chunk.arguments))]
        self._shown = self._raw.rfind(chunk) + len(chunk)
        text = chunk.lstrip() if self._skip_spaces else str(chunk)
        self._skip_spaces = self._skip_spaces and not text
        if isinstance(chunk, serving.ReasoningText):
            return [ReplyPart(reasoning=text)] if text else []
        return _text(text)

    def _give_up(self) -> list[ReplyPart]:
        self._parser = None
        return _text(self._raw[self._shown :])


class TextDecoder:
    """Decoder of tokens, one by one, to text in complete characters."""

    def __init__(self, dialogue: Dialogue, special: bool) -> None:
        self._dialogue, self._special = dialogue, special
        self._ids: list[int] = []  # the last tokens returned, for context, and those held back
        self._returned = 0  # how many of `_ids` were returned

    def feed(self, token_id: int) -> str:
        """Decode one more token; return the text that is complete with it.

        The result is "" while a character's last bytes are missing, for at most 8 tokens.
        """
        self._ids.append(token_id)
        text = self._dialogue.decode(self._ids, self._special)
        half = text.endswith(HALF) and len(self._ids) - self._returned < MOST_HELD
        return "" if half else self._take(text)

    def end(self) -> str:
        """Return the text that was held back, even if its last character is incomplete."""
        return self._take(self._dialogue.decode(self._ids, self._special))

    def _take(self, text: str) -> str:
        """Return the part of this text that was not returned before."""
        before = self._dialogue.decode(self._ids[: self._returned], self._special)
        # Tokenizers that write a space before words need to see the tokens just before.
        self._ids = self._ids[self._returned :]
        self._returned = len(self._ids)
        return text[len(before) :]


def _text(text: str) -> list[ReplyPart]:
    return [ReplyPart(text)] if text else []
