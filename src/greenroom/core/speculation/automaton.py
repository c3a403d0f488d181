"""A suffix automaton of token ids: finds the longest suffix of a text that occurred before.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state stands
for the sequences of tokens that end at the same places of the text. Each token adds at most two
states. SAM-Decoding (Hu et al., 2024) drafts tokens by such automata. A match is found token by
token in amortised constant time, however often the text repeats itself.
"""

from __future__ import annotations

from array import array

ROOT = 0
NONE = -1  # no state
NO_TOKEN = -2
SEPARATOR = -1  # between texts of one automaton; no other text has it


class SuffixAutomaton:
    """A suffix automaton of one growing text of token ids.

    tokens:  the text
    matched: the length of its longest suffix that also occurs earlier in it
    place:   where the token after an earlier occurrence of this suffix is; one of the latest
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.matched = self.place = 0
        self._link, self._length = array("i", [NONE]), array("i", [0])
        self._end = array("i", [0])  # one of the places after the state's sequences
        # The transitions of a state. Most states have one, which takes less memory than a dict.
        self._token, self._target = array("i", [NO_TOKEN]), array("i", [NONE])
        self._others: dict[int, dict[int, int]] = {}
        self._last = ROOT

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        link, length = self._link, self._length
        end = len(self.tokens)
        state, at = self._new_state(length[self._last] + 1, end), self._last
        while at != NONE and (target := self.next(at, token)) == NONE:
            self._connect(at, token, state)
            at = link[at]
        if at == NONE:
            link[state] = ROOT
        elif length[at] + 1 == length[target]:
            link[state] = target
        else:
            copy = self._copy(target, length[at] + 1)
            while at != NONE and self.next(at, token) == target:
                self._connect(at, token, copy)
                at = link[at]
            link[target] = link[state] = copy
        self._last = state
        match = link[state]
        self.matched, self.place = length[match], self._end[match]
        self._end[match] = end

    def next(self, state: int, token: int) -> int:
        """Return the state after a state's sequences and one more token; NONE if there is none."""
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def _new_state(self, length: int, end: int) -> int:
        self._link.append(NONE)
        self._length.append(length)
        self._end.append(end)
        self._token.append(NO_TOKEN)
        self._target.append(NONE)
        return len(self._link) - 1

    def _copy(self, state: int, length: int) -> int:
        """Split off the sequences of a state of at most this length; return their new state."""
        copy = self._new_state(length, self._end[state])
        self._token[copy], self._target[copy] = self._token[state], self._target[state]
        if (others := self._others.get(state)) is not None:
            self._others[copy] = others.copy()
        self._link[copy] = self._link[state]
        return copy

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (NO_TOKEN, token):
            self._token[state], self._target[state] = token, target
        else:
            self._others.setdefault(state, {})[token] = target

    def advance(self, match: Match, token: int) -> None:
        """Extend the match of another text by its next token."""
        state, matched = self._shortest(match), match.length
        while state != NONE and (target := self.next(state, token)) == NONE:
            state = self._link[state]
            matched = self._length[state] if state != NONE else 0
        match.state, match.length = (ROOT, 0) if state == NONE else (target, matched + 1)
        match.place = self._end[self._shortest(match)]

    def _shortest(self, match: Match) -> int:
        """Return the state of a match; states may have been split since it was found."""
        state = match.state
        while state != ROOT and self._length[self._link[state]] >= match.length:
            state = self._link[state]
        match.state = state
        return state

    def after(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, up to a separator.

        Where the text ends, it is assumed to repeat itself from `place` on.
        """
        tokens = self.tokens[place : place + count].tolist()
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        while 0 < len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens


class Match:
    """The longest suffix of another text that occurs in an automaton's text.

    place: where the token after one of its occurrences is
    """

    __slots__ = ("length", "place", "state")

    def __init__(self) -> None:
        self.state, self.length, self.place = ROOT, 0, 0
