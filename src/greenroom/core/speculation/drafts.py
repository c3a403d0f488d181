"""Draft tokens of a text: what followed its last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from greenroom.core.speculation.automaton import SEPARATOR, Match, SuffixAutomaton

LEAST_MATCH = 2  # tokens that must have occurred before
LONGEST = 15  # tokens of a draft
HISTORY = 1 << 16  # tokens of earlier texts
RECENT = 64  # tokens that are compared with earlier texts when these change

PRIOR = 4.0  # weight of the chances below, in draft tokens
MEMORY = 128.0  # draft tokens after which older ones count less
# Chance that a draft token is right if the one before was, by the bit length of the match.
CHANCES = (0.0, 0.3, 0.5, 0.75, 0.85, 0.95)


class Draft(NamedTuple):
    """A guess of the tokens that follow.

    `chance` is the chance that each of `tokens` is right if those before it are.
    """

    tokens: Sequence[int] = ()
    chance: float = 0.0


class Acceptance:
    """How often draft tokens were right, by the length of the match that they follow."""

    def __init__(self) -> None:
        self._right = [PRIOR * chance for chance in CHANCES]
        self._all = [PRIOR] * len(CHANCES)

    def chance(self, matched: int) -> float:
        """Return the chance that a draft token is right, if those before it are."""
        at = _class_of(matched)
        return self._right[at] / self._all[at]

    def record(self, matched: int, right: int, complete: bool) -> None:
        """Record a draft: how many of its first tokens were right, and whether all were."""
        at = _class_of(matched)
        self._right[at] += right
        self._all[at] += right + (not complete)
        if (excess := self._all[at] / MEMORY) > 1:
            self._right[at] /= excess
            self._all[at] /= excess


def _class_of(matched: int) -> int:
    return min(matched.bit_length(), len(CHANCES) - 1)


class History:
    """Earlier texts, of which drafts are taken; the oldest are forgotten.

    automata: the newest texts, then older ones
    """

    def __init__(self, limit: int = HISTORY) -> None:
        self._limit = max(2, limit // 2)
        self.automata: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)

    def __len__(self) -> int:
        return sum(map(len, self.automata))

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text, or its last tokens if it is too long."""
        tokens = tokens[max(0, len(tokens) - self._limit + 1) :]
        if len(self.automata[0]) + len(tokens) + 1 > self._limit:
            self.automata = SuffixAutomaton(), self.automata[0]
        for token in (*tokens, SEPARATOR):
            self.automata[0].add(token)


class Drafter:
    """Drafts the next tokens of one text, from the text itself and from earlier texts.

    It also observes which drafts would have been right, whether they are used or not.
    """

    def __init__(self, acceptance: Acceptance, history: History | None = None) -> None:
        self._text, self._acceptance, self._history = SuffixAutomaton(), acceptance, history
        self._matches: list[tuple[SuffixAutomaton, Match]] = []
        self._open: Sequence[int] = ()  # tokens of the draft that is observed
        self._matched = self._right = 0  # of this draft

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._observe(token)
            self._text.add(token)
            for automaton, match in self._matches:
                automaton.advance(match, token)

    def draft(self) -> Draft:
        """Return the most likely next tokens; none without a match."""
        self._follow_history()
        matched, (automaton, place) = self._text.matched, (self._text, self._text.place)
        for other, match in self._matches:
            if match.length > matched:
                matched, automaton, place = match.length, other, match.place
        if matched < LEAST_MATCH:
            return Draft()
        tokens = automaton.after(place, LONGEST)
        if not self._open:
            self._open, self._matched, self._right = tokens, matched, 0
        return Draft(tokens, self._acceptance.chance(matched))

    def tokens(self, draft: Draft, count: int) -> list[int]:
        """Return the first `count` tokens of a draft."""
        return list(draft.tokens[:count])

    def _observe(self, token: int) -> None:
        """Compare a token with the draft that was made before it."""
        if not self._open:
            return
        right = self._open[self._right] == token
        self._right += right
        if not right or self._right == len(self._open):
            self._acceptance.record(self._matched, self._right, right)
            self._open = ()

    def _follow_history(self) -> None:
        """Begin to match automata that are new in the history."""
        if self._history is None:
            return
        automata = self._history.automata
        if [each for each, _ in self._matches] == list(automata):
            return
        self._matches = [(each, Match()) for each in automata]
        for token in self._text.tokens[-RECENT:]:
            for automaton, match in self._matches:
                automaton.advance(match, token)
