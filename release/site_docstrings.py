"""Extension of griffe: docstrings' lines `name: meaning` become lists for the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"^(\w+(?:, \w+)*|\w+\([\w, ]*\)):\s+(?=\S)")


def as_list(text: str) -> str:
    """Turn consecutive lines `name: meaning` and their continuations into a Markdown list."""
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        named = NAMED.match(line)
        continues = inside and re.match(r" +\S", line)
        if named:
            if not inside:
                lines.append("")
            line, inside = f"- `{named[1]}`: {line[named.end() :]}", True
        elif continues:
            line = f"    {line.strip()}"
        else:
            inside = False
        lines.append(line)
    return "\n".join(lines)


class Lists(griffe.Extension):
    """Rewrites the docstring of each object that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
