"""Bounds of the JSON schemas that clients send, checked before a grammar is compiled.

Without bounds, a schema of 1 MB takes half a minute to compile. Within the bounds, a schema takes
less than 0.3 s and a few MiB. OpenAI has similar bounds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

MOST_BYTES = 64 << 10  # as JSON, all tools of a request together
MOST_NODES = MOST_BYTES // 4  # values of any kind, the keywords' own included
MOST_DEPTH = 64  # of brackets: an object within an object is two
VALUES, LITERAL = "values in enums and constants", "characters in enums and constants"
PATTERN = "characters in patterns"
MOST = {
    "parts": MOST_NODES,
    "properties": 1000,
    VALUES: 1000,
    LITERAL: 16 << 10,  # as JSON
    PATTERN: 2 << 10,
}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_error(schema: Any) -> str | None:
    """Return why a JSON schema, or a list of schemas, is refused; None if it is accepted."""
    counts: Counter[str] = Counter()
    try:
        for depth, key, value in _walk(schema):
            if depth > MOST_DEPTH:
                return f"it is nested deeper than {MOST_DEPTH} brackets"
            if key in REFERENCES and isinstance(value, str) and not value.startswith("#"):
                return f"{value[:80]!r} is a reference to another document: references begin with #"
            counts.update(_parts(key, value))
            if what := next((what for what, most in MOST.items() if counts[what] > most), None):
                return f"it has more than {MOST[what]:,} {what}"
        nbytes = len(json.dumps(schema, separators=(",", ":")))
    except (TypeError, ValueError) as error:
        return f"it is not JSON: {error}"
    return f"it has {nbytes:,} bytes, more than {MOST_BYTES:,}" if nbytes > MOST_BYTES else None


def _parts(key: str, value: Any) -> dict[str, int]:
    """Count the bounded parts in the value of a JSON schema's keyword."""
    counts = {"parts": 1}
    if key in ("properties", "patternProperties") and isinstance(value, dict):
        counts["properties"] = len(value)
        counts[PATTERN] = sum(map(len, value)) if key == "patternProperties" else 0
    elif key in ("enum", "const"):
        below = islice(_walk(value), MOST[VALUES] + 2)
        counts[VALUES] = sum(1 for _ in below) - isinstance(value, list)
        counts[LITERAL] = len(json.dumps(value))
    elif key == "pattern" and isinstance(value, str):
        counts[PATTERN] = len(value)
    return counts


def _walk(value: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield (depth, key, value) of all parts of a JSON value.

    Items of lists have no key.
    """
    left: list[tuple[int, str, Any]] = [(0, "", value)]
    while left:
        depth, key, one = left.pop()
        yield depth, key, one
        if isinstance(one, dict):
            items = islice(one.items(), MOST_NODES + 1)  # one more is too many already
            left += [(depth + 1, str(name), each) for name, each in items]
        elif isinstance(one, list | tuple):
            left += [(depth + 1, "", each) for each in islice(one, MOST_NODES + 1)]
