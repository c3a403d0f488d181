"""Answers that follow a grammar, by llguidance: which tokens may come next."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greenroom.errors import UsageError


class Grammars:
    """Grammars over one model's tokens. What they need of its vocabulary is made at first use."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocabulary, self._end_ids = tokenizer, vocabulary, end_ids
        self._made: Any = None
        self._lock = threading.Lock()

    def __call__(self, grammar: str) -> Grammar:
        """UsageError where the grammar is none, or llguidance is not installed or cannot read the
        tokenizer."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UsageError("grammars need llguidance: pip install 'greenroom[serve]'") from None
        matcher = LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"grammar: {' '.join(matcher.get_error().split())[:300]}")
        return Grammar(matcher, self._vocabulary)

    def _tokens(self) -> Any:
        with self._lock:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._made = from_tokenizer(
                        self._tokenizer, self._vocabulary, list(self._end_ids) or None
                    )
                except (TypeError, ValueError, AssertionError) as error:
                    raise UsageError(f"grammars: this tokenizer cannot be read: {error}") from error
            return self._made


class Grammar:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocabulary + 31) // 32, np.int32)

    def allowed(self, count: int) -> Tensor:
        """Which of `count` tokens may come next, [count]. UsageError where none may."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:count].astype(bool)
        mask = np.zeros(count, bool)
        mask[: bits.size] = bits
        if self._matcher.is_error() or not mask.any():
            raise UsageError(f"grammar: no token can follow: {self._matcher.get_error()[:200]}")
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """A token was chosen."""
        self._matcher.consume_token(token)

    @property
    def over(self) -> bool:
        """Can nothing follow?"""
        return bool(self._matcher.is_stopped())
