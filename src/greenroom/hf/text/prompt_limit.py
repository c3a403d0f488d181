"""Refuse prompts that are much too long before they are rendered and tokenised.

    limit = PromptLimit(tokenizer, context=4096)
    limit.check_messages(messages, tools)  # before the chat template renders the messages
    limit.check_text(text)                 # before the tokenizer reads the entire text

Both methods raise TooLong if the prompt is certainly too long. They are early checks that save
work: the exact number of tokens is checked later.
"""

from __future__ import annotations

from typing import Any

from greenroom.errors import TooLong, UsageError

PIECE = 1 << 14  # characters that are tokenised at a time to check a long text
DENSE = 8  # characters a token; longer texts are checked piece by piece first
SPARE = 1 << 10  # further characters, for parts of messages that templates drop


class PromptLimit:
    """Limits on a prompt's messages and characters, from the tokens of the context.

    most_chars: characters of `context` tokens of the vocabulary's longest token, and some spare
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.most_chars = context * longest + SPARE

    def check_messages(self, messages: list[dict[str, Any]], tools: Any = None) -> None:
        """Raise TooLong for a conversation whose messages cannot fit into the context.

        It cannot fit if there are more messages than tokens in the context, or if messages and
        tools have more characters than the longest possible prompt.
        """
        if len(messages) > self._context:
            raise TooLong(
                f"the conversation has {len(messages):,} messages, too many for the context of"
                f" {self._context:,} tokens: send fewer messages, or raise --context"
            )
        self._check(count_chars(messages) + count_chars(tools))

    def check_text(self, text: str) -> None:
        """Raise TooLong for a text with many more tokens than the context.

        A long text is tokenised in parts, and only until it has twice the context's tokens.
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
                    "the prompt has too many tokens for the context of"
                    f" {self._context:,} tokens: shorten the prompt, or raise --context"
                )

    def _check(self, chars: int) -> None:
        if chars > self.most_chars:
            raise TooLong(
                f"the prompt has {chars:,} characters, too many for the context of"
                f" {self._context:,} tokens: shorten the prompt, or raise --context"
            )


def token_ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Convert a text to token ids. Raises UsageError if the text is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt is not valid Unicode: one half of a surrogate pair has no other half"
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
