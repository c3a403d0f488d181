"""Choice of the replica that answers a request, by the conversations that replicas hold.

affinity = Affinity(places=8)
name = affinity.order(["a", "b"], prefix_of(body))[0]
affinity.begin(name, "request 1", prefix_of(body))
affinity.end(name, "request 1")
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

PIECE = 1024  # characters of a message that are compared at once
MOST_PIECES = 100_000  # whose replicas are remembered
INSTRUCTIONS = ("tools", "system", "instructions")  # fields of a request, before its messages
INSTRUCTING = ("system", "developer")  # roles of messages that many conversations share


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginnings of a request's conversation.

    digests:      one for each beginning, the shortest first
    instructions: how many of them have instructions alone, which other conversations may share
    """

    digests: tuple[str, ...] = ()
    instructions: int = 0


def prefix_of(body: bytes) -> Prefix:
    """Return the beginnings of the conversation in a request's body, of any of the APIs."""
    try:
        return _prefix(json.loads(body))
    except (ValueError, RecursionError):
        return Prefix()


def _prefix(request: Any) -> Prefix:
    if not isinstance(request, dict):
        return Prefix()
    turns = request.get("messages") or request.get("input") or request.get("prompt") or []
    if not (isinstance(turns, list) and all(isinstance(each, dict) for each in turns)):
        turns = [turns]  # a text, or token ids
    head = [request[name] for name in INSTRUCTIONS if request.get(name)]
    shared = len(head)
    for turn in turns:
        if not (isinstance(turn, dict) and turn.get("role") in INSTRUCTING):
            break
        shared += 1
    # Variants of a model share no keys and values.
    chain = hashlib.sha256(json.dumps(request.get("model")).encode())
    digests, instructions = list[str](), 0
    for number, part in enumerate([*head, *turns]):
        text = json.dumps(part)
        for first in range(0, len(text), PIECE):
            chain.update(text[first : first + PIECE].encode())
            digests.append(chain.hexdigest()[:24])
        if number < shared:
            instructions = len(digests)
    return Prefix(tuple(digests), instructions)


class Affinity:
    """Knows which replicas hold which conversations, and how many requests each has.

    `places` are the answers that a replica computes at a time. `replicas` are the names of those
    that get requests from this process, which has one deployment.
    """

    replicas: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, places: int) -> None:
        self._places = places
        self._holders = OrderedDict[str, set[str]]()
        self._running = defaultdict[str, set[str]](set)
        self._latest = defaultdict[str, int](int)  # number of the last request that began

    def order(
        self, replicas: Sequence[str], prefix: Prefix, failed: Collection[str] = ()
    ) -> list[str]:
        """Return the replicas, the best one for a request first.

        That is the one that holds its conversation, while that one has a free place; otherwise the
        one with the fewest requests, and of several the one whose last request is longest ago:
        common instructions are soon held by all. Those that have `failed` come last.
        """

        def rank(replica: str) -> tuple[bool, int, int, int]:
            count, load = self._count(prefix, replica), len(self._running[replica])
            preferred = count if count > prefix.instructions and load < self._places else 0
            return replica in failed, -preferred, load, self._latest[replica]

        return sorted(replicas, key=rank)

    def begin(self, replica: str, request: str, prefix: Prefix) -> None:
        """Note that a replica answers a request, and holds its conversation from now on.

        A request without a conversation, as the live page's, takes no place.
        """
        if prefix.digests:
            self._running[replica].add(request)
        self._latest[replica] = max(self._latest.values(), default=0) + 1
        for each in prefix.digests:
            self._holders.setdefault(each, set()).add(replica)
            self._holders.move_to_end(each)
        while len(self._holders) > MOST_PIECES:
            self._holders.popitem(last=False)

    def end(self, replica: str, request: str) -> None:
        self._running[replica].discard(request)

    def _count(self, prefix: Prefix, replica: str) -> int:
        """Return how many of a conversation's beginnings a replica holds."""
        for number in range(len(prefix.digests), 0, -1):
            if replica in self._holders.get(prefix.digests[number - 1], ()):
                return number
        return 0
