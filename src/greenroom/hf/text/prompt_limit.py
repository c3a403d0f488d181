"""Refuse prompts that are too long, before templates and tokenizers do work.

limit = PromptLimit(tokenizer, context=4096)
limit.check_messages(messages, tools)      # TooLong, by characters, before they are rendered
limit.check_text(text)                     # TooLong, before the whole of it is tokenised
"""

from __future__ import annotations

from typing import Any

from greenroom.errors import TooLong, UsageError

PIECE = 1 << 14  # characters that are tokenised at a time to check a long text
DENSE = 8  # characters a token; longer texts are checked piece by piece first
SPARE = 1 << 10  # further characters, for parts of messages that templates drop


class PromptLimit:
    """Limits on the characters and messages of a prompt of at most `context` tokens."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.most_chars = context * longest + SPARE

    def check_messages(self, messages: list[dict[str, Any]], tools: Any = None) -> None:
        """Raise TooLong for a conversation whose messages cannot fit into the context.

        They have more characters with their tools than any prompt, or more messages than tokens.
        """
        if len(messages) > self._context:
            raise TooLong(
                f"{len(messages):,} messages do not fit: there is room for {self._context} tokens"
            )
        self._check(count_chars(messages) + count_chars(tools))

    def check_text(self, text: str) -> None:
        """Raise TooLong for a text of too many tokens.

        Not much more is tokenised than fits.
        """
        self._check(len(text))
        if len(text) <= max(PIECE, DENSE * self._context):
            return
        tokens = 0
        for start in range(0, len(text), PIECE):
            tokens += len(token_ids(self._tokenizer, text[start : start + PIECE], special=False))
            # Pieces may have some tokens more than the entire text.
            if tokens > 2 * self._context:
                raise TooLong(
                    f"the prompt has more than {self._context} tokens: there is no room for it"
                )

    def _check(self, chars: int) -> None:
        if chars > self.most_chars:
            raise TooLong(
                f"the prompt has {chars:,} characters: there is room for {self._context} tokens"
            )


def token_ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Convert a text to token ids; UsageError where it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt is not valid Unicode: it contains half a surrogate pair"
        ) from error
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def count_chars(value: Any) -> int:
    """Count the characters in all texts of a JSON value."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return count
