"""JSON schemas that clients send, bounded before a grammar is made of them.

Without bounds a schema of 1 MB takes a thread half a minute. Within them one takes less than 0.3 s
to compile and a few MiB; OpenAI's own bounds are of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

MOST_BYTES = 64 << 10  # as JSON, all tools of a request together
MOST_NODES = MOST_BYTES // 4  # values of any kind, the keywords' own included
MOST_DEPTH = 64  # of brackets: an object within an object is two
MOST_PROPERTIES = 1000
MOST_VALUES = 1000  # in all enums and constants
MOST_LITERAL = 16 << 10  # characters of these, as JSON
MOST_PATTERN = 2 << 10  # characters of all patterns
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def too_large(schema: Any) -> str | None:
    """Why a schema, or a list of them, is refused; None where it is not."""
    count, nodes = Count(), 0
    try:
        for depth, key, value in _walk(schema):
            nodes += 1
            if nodes > MOST_NODES:
                return f"it has more than {MOST_NODES:,} parts"
            if depth > MOST_DEPTH:
                return f"it is nested deeper than {MOST_DEPTH} brackets"
            count.add(key, value)
            if wrong := count.wrong():
                return wrong
        nbytes = len(json.dumps(schema, separators=(",", ":")))
    except (TypeError, ValueError) as error:
        return f"it is not JSON: {error}"
    return f"it has {nbytes:,} bytes, more than {MOST_BYTES:,}" if nbytes > MOST_BYTES else None


class Count:
    """What a schema is made of, as far as it was read."""

    def __init__(self) -> None:
        self.properties = self.values = self.literal = self.pattern = 0
        self.reference = ""

    def add(self, key: str, value: Any) -> None:
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            self.properties += len(value)
            self.pattern += sum(map(len, value)) if key == "patternProperties" else 0
        elif key in ("enum", "const"):
            below = islice(_walk(value), MOST_VALUES + 2)
            self.values += sum(1 for _ in below) - isinstance(value, list)
            self.literal += len(json.dumps(value))
        elif key == "pattern" and isinstance(value, str):
            self.pattern += len(value)
        elif key in REFERENCES and isinstance(value, str) and not value.startswith("#"):
            self.reference = value

    def wrong(self) -> str | None:
        for name, found, most in (
            ("properties", self.properties, MOST_PROPERTIES),
            ("values in enums and constants", self.values, MOST_VALUES),
            ("characters in enums and constants", self.literal, MOST_LITERAL),
            ("characters in patterns", self.pattern, MOST_PATTERN),
        ):
            if found > most:
                return f"it has more than {most:,} {name}"
        if self.reference:
            return f"{self.reference[:80]!r} is outside of it: references begin with #"
        return None


def _walk(value: Any) -> Iterator[tuple[int, str, Any]]:
    """(depth, key, value) of everything in a JSON value; items of lists have no key."""
    left: list[tuple[int, str, Any]] = [(0, "", value)]
    while left:
        depth, key, one = left.pop()
        yield depth, key, one
        if isinstance(one, dict):
            items = islice(one.items(), MOST_NODES + 1)  # one more is too many already
            left += [(depth + 1, str(name), each) for name, each in items]
        elif isinstance(one, list | tuple):
            left += [(depth + 1, "", each) for each in islice(one, MOST_NODES + 1)]
