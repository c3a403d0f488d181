"""Grammars that answers must follow, by llguidance: masks of the tokens that may come next."""

from __future__ import annotations

import contextlib
import threading
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenroom.errors import UsageError

CACHED = 4  # compiled grammars that are cached for further requests and choices
# Work and memory of one grammar: the library's default bounds are for trusted clients.
BOUNDS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,  # about 10 ms
    "step_lexer_fuel": 100_000,  # about 7 ms a token
    "step_max_items": 50_000,  # about 3 ms a token
    "max_lexer_states": 20_000,  # about 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # clients are not shown the parser's state
}


def limits() -> Any:
    """Return llguidance's bounds on the size of one grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(**BOUNDS)


def reason(error: str) -> str:
    """Shorten an error message of llguidance to one line, without its parser's state."""
    for state in ("<state>", "<non-verbose/>"):
        error = error.partition(state)[0]
    return " ".join(error.split())[:300] or "the grammar cannot be followed"


class Grammars:
    """Compiles llguidance grammars over one model's tokens, and caches the last few.

    The tokenizer's vocabulary is read at the first use, or by `prepare`.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocabulary, self._end_ids = tokenizer, vocabulary, end_ids
        self._vocabulary_trie: Any = None
        self._compiled = lru_cache(CACHED)(self._compile)
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary before the first grammar is compiled.

        A large vocabulary takes seconds. Errors are ignored: the first request with a grammar
        raises them.
        """
        with contextlib.suppress(UsageError, ImportError):  # the first request gets this error
            self._tokens()

    def __call__(self, grammar: str) -> Grammar:
        """Compile a grammar, and return its state for one answer.

        UsageError if the grammar is not valid, llguidance is not installed, or llguidance cannot
        read the tokenizer.
        """
        if find_spec("llguidance") is None:
            raise UsageError("grammars need llguidance: pip install 'greenroom[serve]'")
        return Grammar(self._compiled(grammar).deep_copy(), self._vocabulary)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise UsageError(f"the grammar is not valid: {reason(matcher.get_error())}")
        self._check_begins(matcher)
        return matcher

    def _check_begins(self, matcher: Any) -> None:
        """Raise UsageError if a grammar allows no first token, as with a self-referring schema."""
        try:
            Grammar(matcher.deep_copy(), self._vocabulary).allowed(self._vocabulary)
        except UsageError:
            raise UsageError(
                "the grammar allows no answer: it contradicts itself, or refers only to itself"
            ) from None

    def _tokens(self) -> Any:
        with self._lock:
            if self._vocabulary_trie is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._vocabulary_trie = from_tokenizer(
                        self._tokenizer, self._vocabulary, list(self._end_ids) or None
                    )
                except (TypeError, ValueError, AssertionError) as error:
                    raise UsageError(
                        "grammars and JSON formats are not available for this model: llguidance"
                        f" cannot read its tokenizer: {error}"
                    ) from error
            return self._vocabulary_trie


class Grammar:
    """The state of one answer in the grammar that the answer must follow."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocabulary + 31) // 32, np.int32)

    def allowed(self, count: int) -> Tensor:
        """Return a boolean mask [count] of the tokens that a grammar allows next.

        UsageError if the grammar allows no token.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:count].astype(bool)
        mask = np.zeros(count, bool)
        mask[: bits.size] = bits
        if self._matcher.is_error() or not mask.any():
            why = reason(self._matcher.get_error())
            raise UsageError(f"the grammar allows no further token: {why}")
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """Advance a grammar's state by a chosen token."""
        self._matcher.consume_token(token)

    @property
    def over(self) -> bool:
        """Is the answer complete by its grammar, so that no token can follow?"""
        return bool(self._matcher.is_stopped())
